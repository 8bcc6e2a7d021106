"""Files of any content: each is read as something usable, or refused by the documented error in one line.

Ten seconds in the suite, or as many as STOCHBN_FUZZ_SECONDS says. `make fuzz` takes minutes, and new seeds each time. A
failure names its seed; STOCHBN_FUZZ_SEED begins there.
"""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stochbn
from mutations import mutate
from stochbn.distributions.base import Layer
from stochbn.distributions.files import FAMILIES
from stochbn.distributions.tuning import Score, Tuning
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import File
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.notes import describe_notes, describe_provenance, describe_title, summarise
from stochbn.experiments.report.scores import score
from stochbn.experiments.report.tables import appendix_tables
from stochbn.experiments.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    load_network,
    read_checkpoint,
    write_checkpoint,
)
from stochbn.experiments.training.recipes import RECIPES
from stochbn.statistics.moments import Moments

pytestmark = [  # of torch, on types and sizes that only such files have
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]
SECONDS = float(os.environ.get("STOCHBN_FUZZ_SECONDS", "10"))
FIRST_SEED = int(os.environ.get("STOCHBN_FUZZ_SEED", "0"))
MOST_SECONDS = 20  # for one file
MOST_BYTES = 2**30  # that reading one may take


@contextmanager
def limited() -> Iterator[None]:
    """Raises if what runs inside takes too long or too much memory."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(MOST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(file: Path, kind: str, use: Callable[[Path], object], errors: type[Exception], seconds: float) -> None:
    sound, target = file.read_bytes(), file.with_name("mutated.safetensors")
    target.write_bytes(sound)
    use(target)  # also so that what is imported on the way is in memory
    end, seed, num_used = time.monotonic() + seconds, FIRST_SEED, 0
    while time.monotonic() < end or seed < FIRST_SEED + 50:
        content = mutate(sound, kind, random.Random(seed))
        target.unlink()  # rather than write into it: tensors of the last one may still be mapped
        target.write_bytes(content)
        try:
            with limited():
                use(target)
            num_used += 1
        except errors as error:
            message = str(error)
            assert message.startswith("Expected "), f"seed {seed}: {message}"
            assert "\n" not in message, f"seed {seed}: {message}"
            assert len(message) < 1500, f"seed {seed}: {message}"
            assert message.isprintable(), f"seed {seed}: {message!r}"
            assert str(target) in message, f"seed {seed}: {message}"
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        seed += 1
    print(f"{kind}: {seed - FIRST_SEED} files, of which {num_used} could be used")
    assert num_used < seed - FIRST_SEED


def make_statistics(family: str) -> stochbn.Distribution:
    layers = {name: Layer(1e-5, Moments.of(torch.randn(4, 2, 3, dtype=torch.float64))) for name in ("a", "b.c")}
    tuning = (
        Tuning({"a": 1.5, "b.c": 0.5}, 0.8, (Score(1.0, 0.8, 0.3, -0.1, 0.02), Score(None, 1.1, 0.4)))
        if family == "factorized"
        else Tuning(0.5)
    )
    array = FAMILIES[family].array
    arrays = {array: torch.randn(4, 2, 6)} if array else {}
    return FAMILIES[family](layers, 16, 4, ("d",), False, True, tuning, **arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics(family: str, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        draws = stochbn.load(path).sample(2, seed=0)
        assert all(len(values) == 2 for values in draws.buffers.values())

    make_statistics(family).save(tmp_path / "file")
    fuzz(tmp_path / "file", "stochbn", use, ValueError, SECONDS / 6)


def test_checkpoints(tmp_path: Path) -> None:
    recipe = replace(RECIPES["digits"], name="tiny", width=0.03, epochs=2)
    history = [{"train_loss": 0.5, "seconds": 1.0}] * 2
    weights = recipe.build_network().state_dict()
    write_checkpoint(tmp_path / "file", Checkpoint(recipe, 0, history, weights, {}))

    def use(path: Path) -> None:
        found = read_checkpoint(path)
        assert all(isinstance(value, (int, float)) for epoch in found.history for value in epoch.values())
        load_network(path)

    fuzz(tmp_path / "file", "checkpoint", use, CheckpointError, SECONDS / 6)


def make_tensors(*names: str) -> dict[str, torch.Tensor]:
    probs = torch.rand(7, 3).softmax(1)
    outputs = {"log_probs": probs.log().half(), "expected_entropy": torch.special.entr(probs).sum(1)}
    return {f"{name}/{kind}": tensor.clone() for name in names for kind, tensor in outputs.items()}


def test_predictions(tmp_path: Path) -> None:
    header = {
        "kind": "predictions",
        "experiment": "lenet5",
        "recipe": "lenet5",
        "seed": 0,
        "data": "mnist",
        "out_of_domain": "notmnist",
        "classes": ["a", "b", "c"],
        "batch_size": 16,
        "epochs": 2,
        "num_samples": 8,
        "validation_nll": [0.2, 0.1],
        "train_loss": [0.3, 0.2],
        "train_seconds": 9.5,
        "draw_seed": 0,
        "format": 3,
        "command": "stochbn evaluate lenet5",
        "commit": "abc",
        "versions": {"torch": "2"},
        "draws": {"sbn": 8},
        "methods": {"sbn": {"num_samples": 8, "seconds": 1.0, "commit": "abc"}},
    }
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0], dtype=torch.uint8)
    parts = ("test", "out-of-domain", "validation")
    tensors = make_tensors(*(f"{method}/{part}" for method in ("plain", "sbn") for part in parts))
    File(header, tensors | {"labels": labels, "labels/validation": labels.clone()}).write(tmp_path / "file")

    def use(path: Path) -> None:
        file = File.read(path)
        if file.header.get("kind") == "predictions":  # others are no business of the report
            results = collect([file])
            score(results)
            describe_title(results), describe_notes(results, has_paper=False), describe_provenance([file], results)

    fuzz(tmp_path / "file", "stochbn", use, DataError, SECONDS / 6)


def test_diagnostics(tmp_path: Path) -> None:
    stage = {"lower": [-0.5, 0.01], "marginal": [-0.4, 0.01], "gap": [0.1, 0.01]}
    effect = {"nll": 0.1, "entropy_test": 0.1, "entropy_out_of_domain": 0.5, "auroc": 0.9}
    header = {
        "kind": "diagnostics",
        "network": "lenet5 seed 0",
        "commit": "abc",
        "command": "",
        "versions": {},
        "statistics": {"layers": ["a"], "num_batches": 4, "batch_size": 16},
        "bound": {"before": stage, "after": stage, "num_examples": 5, "num_samples": 8, "batch_size": 16},
        "by_samples": [{"num_samples": 8, **effect}],
        "num_curve": {"test": 7, "out-of-domain": 7},
    }
    shapes = {"observed": (4, 2, 2), "centre": (2, 2), "std": (2, 2), "ks": (2, 5)}
    tensors = {f"statistics/a/{name}": torch.rand(shape) for name, shape in shapes.items()}
    tensors |= {"statistics/a/channels": torch.tensor([0, 4]), "exact/test/index": torch.arange(7)}
    File(header, tensors | make_tensors("exact/test")).write(tmp_path / "file")

    def use(path: Path) -> None:
        file = File.read(path)
        if file.header.get("kind") == "diagnostics":
            appendix_tables(summarise(file))

    fuzz(tmp_path / "file", "stochbn", use, DataError, SECONDS / 6)
