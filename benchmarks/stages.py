"""What is measured: cells of network, N and S; fitting; growth with N and S; memory. Each returns data for the JSON."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

import stochbn
from benchmarks import memory
from benchmarks.contenders import CONTENDERS, LEFT_OUT, OURS, PLAIN, Contender, Run, check
from benchmarks.limits import count_flops, needed_flops
from benchmarks.measure import affordable, interleave, ratios, seconds, summarise
from benchmarks.subjects import BATCH_SIZE, Subject

LARGE_BATCH = 256
NUM_FIT_IMAGES = {"lenet5": 2048, "vgg11": 512, "resnet18": 256}
GROWING = ("lenet5", "resnet18")

Update = Callable[[str], object]


@dataclass(frozen=True)
class Settings:
    """What a run covers.

    Attributes:
        networks: Keys of `KINDS`.
        rows: N.
        samples: S.
        repeats: Rounds of each cell.
        compiles: Measure what needs `torch.compile` too.
        most_fit_images: Size of the data to fit to, at most.
        growth_samples: S of the growth at N = 1.
        growth_rows: N of the growth at S = 10.
        memory_samples: S of the memory.
    """

    networks: tuple[str, ...] = ("lenet5", "vgg11", "resnet18", "resnet50")
    rows: tuple[int, ...] = (1, 16, 128)
    samples: tuple[int, ...] = (10, 50)
    repeats: int = 7
    compiles: bool = True
    most_fit_images: int = 2048
    growth_samples: tuple[int, ...] = (2, 10, 50, 200)
    growth_rows: tuple[int, ...] = (1, 4, 16, 64)
    memory_samples: tuple[int, ...] = memory.SAMPLES


def measure_cell(
    subject: Subject, num_rows: int, num_samples: int, settings: Settings, update: Update
) -> dict[str, Any]:
    """Checks and times all contenders on one batch of N rows, for S draws."""
    kind = subject.kind
    x = subject.images(num_rows)
    update("timing one plain pass")
    one = PLAIN.prepare(subject, x, 1)
    assert one is not None
    cost = min(seconds(one) for _ in range(3))
    missing: dict[str, str] = {}
    draws: dict[str, int] = {}
    runs: dict[str, Run] = {}
    for contender in CONTENDERS:
        update(f"preparing {contender.name}")
        reason = _reason_to_skip(contender, subject, num_rows, settings)
        if reason is None:
            size = num_samples
            if contender.passes is not None:
                size = affordable(num_samples, contender.passes * cost, kind.budget)
            try:
                run = contender.prepare(subject, x, size)
            except ImportError:
                run, reason = None, "not installed"
            if run is not None:
                runs[contender.name], draws[contender.name] = run, size
                continue
        missing[contender.name] = reason or "none"
    update("checking that the contenders agree")
    checked = check(subject, x, draws[OURS.name], runs)
    times = interleave(runs, settings.repeats, update=update)
    # Of runs on fewer draws the time is scaled to all of them.
    scaled = {name: [time * num_samples / draws[name] for time in found] for name, found in times.items()}
    whole, shared = count_flops(subject.model, x)
    return {
        "network": subject.key,
        "rows": num_rows,
        "samples": num_samples,
        "flops": {"pass": whole, "shared": shared, "needed": needed_flops(whole, shared, num_samples)},
        "largest_difference": checked,
        "contenders": {
            name: {
                "timed_draws": draws[name],
                "times": found,
                "seconds": summarise(scaled[name]),
                "ratio": summarise(ratios(scaled[name], scaled[PLAIN.name])),
            }
            for name, found in times.items()
        },
        "missing": missing,
    }


def measure_fit(subject: Subject, settings: Settings, update: Update) -> dict[str, Any]:
    """Times `fit` against a training-mode pass over the same batches, and ghost batches of a loader of 256."""
    data = subject.images(min(NUM_FIT_IMAGES[subject.key], settings.most_fit_images))
    small, large = data.split(BATCH_SIZE), data.split(LARGE_BATCH)
    training = deepcopy(subject.model).train()

    @torch.no_grad()
    def passes() -> None:
        for batch in small:
            training(batch)

    runs: dict[str, Callable[[], object]] = {
        "training-mode passes": passes,
        "fit": lambda: stochbn.fit(subject.model, small, progress=False),
        "fit, ghost batches": lambda: stochbn.fit(subject.model, large, batch_size=BATCH_SIZE, progress=False),
    }
    times = interleave(runs, settings.repeats, update=update)
    return {
        "network": subject.key,
        "images": len(data),
        "times": times,
        "fit_to_passes": summarise(ratios(times["fit"], times["training-mode passes"])),
        "ghost_to_fit": summarise(ratios(times["fit, ghost batches"], times["fit"])),
    }


def measure_growth(subject: Subject, settings: Settings, update: Update) -> dict[str, Any]:
    """Times plain passes and `predict` for growing S at N = 1, and for growing N at S = 10; three rounds each."""

    def point(num_rows: int, num_samples: int) -> dict[str, Any]:
        x = subject.images(num_rows)
        runs = {c.name: run for c in (PLAIN, OURS) if (run := c.prepare(subject, x, num_samples)) is not None}
        here = f"growth, N = {num_rows}, S = {num_samples}"
        times = interleave(runs, min(3, settings.repeats), update=lambda doing: update(f"{here}: {doing}"))
        return {"rows": num_rows, "samples": num_samples, "times": times}

    return {
        "network": subject.key,
        "with_samples": [point(1, num_samples) for num_samples in settings.growth_samples],
        "with_rows": [point(num_rows, 10) for num_rows in settings.growth_rows],
    }


def measure_memory(network: str, num_rows: int, settings: Settings, update: Update) -> dict[str, Any]:
    """Measures the peak memory of `predict(keep_samples=False)` for growing S, in bytes."""
    found = []
    for num_samples in settings.memory_samples:
        update(f"memory, S = {num_samples}")
        found.append({"samples": num_samples} | memory.measure_apart(network, num_rows, num_samples))
    return {
        "network": network,
        "rows": num_rows,
        "measured": found,
        "last_to_first": found[-1]["peak"] / found[0]["peak"],
        "growth_last_to_first": _growth(found[-1]) / max(1, _growth(found[0])),
    }


def _growth(found: dict[str, int]) -> int:
    return found["peak"] - found["before"]


def _reason_to_skip(contender: Contender, subject: Subject, num_rows: int, settings: Settings) -> str | None:
    if contender.compiles and not settings.compiles:
        return LEFT_OUT
    if subject.kind.is_large and not contender.large:
        return LEFT_OUT
    if num_rows > (contender.most_rows or math.inf):
        return "not measured"
    return None
