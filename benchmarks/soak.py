"""`python -m benchmarks.soak --minutes 10`: threads, interrupts and faults for a while, and whatever goes wrong.

Answers are computed beforehand, alone. Then threads predict with shared models and predictors, call the models
themselves, make models and drop them, and meet forward passes, loaders and files that fail. The main thread's calls are
interrupted at random moments, as by Ctrl-C. Every answer is compared, and afterwards everything that may be left over.
Writes `soak.json`; the exit code is 1 if anything is wrong.
"""

import argparse
import gc
import json
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.jobs import INTERRUPTED, JOBS, NUM_MODELS, Job, Scene, Tally, be_interrupted
from benchmarks.machine import describe
from stochbn.testing.fingerprint import Fingerprint

GROWTH = 1.1  # of the memory in the second half, at most
PATIENCE = 120.0  # seconds until a thread that does not end is stuck


def work(jobs: tuple[Job, ...], scene: Scene, tally: Tally, chance: random.Random, end: float) -> None:
    """Does jobs, one at a time, until the end."""
    while time.monotonic() < end:
        chance.choice(jobs)(scene, tally, chance, *chance.choice(scene.pairs))


def memory() -> int:
    """Returns how many bytes the process holds; where the system does not say, how many it held at most."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Runs all jobs for so long, in a folder of their own; returns tallies, what was left over, and memory."""
    scene = Scene(seed, folder)
    before = [Fingerprint(model) for model in scene.models]
    state, threads_before, files_before = process_state(), threads_alive(), files_in(folder)
    names = [*JOBS, INTERRUPTED]
    tallies = {name: Tally() for name in names}
    chances = {name: random.Random(f"{seed} {name}") for name in names}
    start = time.monotonic()
    middle, end = start + 30 * minutes, start + 60 * minutes
    threads = [
        threading.Thread(target=work, args=(jobs, scene, tallies[name], chances[name], end), name=name, daemon=True)
        for name, jobs in JOBS.items()
    ]
    held = {"start": memory()}
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        be_interrupted(scene, tallies[INTERRUPTED], chances[INTERRUPTED])
        if "middle" not in held and time.monotonic() >= middle:
            held["middle"] = memory()
    held["end"] = memory()
    deadline = time.monotonic() + PATIENCE
    while (running := threads_alive() - threads_before) and time.monotonic() < deadline:
        time.sleep(0.1)
    gc.collect()
    left = [f"thread {thread.name!r} still runs" for thread in running]
    for number, (model, fingerprint) in enumerate(zip(scene.models, before, strict=True)):
        left += [f"model {number} was changed: {name}" for name in fingerprint.changes(model)]
    left += [f"torch's {name} was changed" for name, value in process_state().items() if value != state[name]]
    written = {f"{m}.sbn.safetensors" for m in range(NUM_MODELS)}
    left += [f"file {name} was left over" for name in sorted(files_in(folder) - files_before - written)]
    left += [f"{len(scene.dropped)} dropped models are still held"] * bool(scene.dropped)
    middle_held = held.setdefault("middle", held["end"])
    if held["end"] > GROWTH * middle_held:
        left.append(f"memory grew from {middle_held:,} to {held['end']:,} bytes in the second half")
    return {"jobs": {name: asdict(tally) for name, tally in tallies.items()}, "left": left, "memory_bytes": held}


def process_state() -> dict[str, object]:
    """Returns what all threads share of torch."""
    return {"random state": torch.get_rng_state().tolist(), "use of oneDNN": torch.backends.mkldnn.enabled}


def threads_alive() -> set[threading.Thread]:
    """Lists threads that run. One that an interrupt kept from being started is listed by Python too, without ident."""
    return {thread for thread in threading.enumerate() if thread.ident is not None}


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def show(results: dict[str, Any]) -> None:
    """Prints the tallies, and all that is wrong."""
    table = Table(
        "job", "calls", "ended on purpose", "right, in other bits", "wrong", title=f"{results['minutes']:g} minutes"
    )
    for name, tally in results["jobs"].items():
        table.add_row(name, *(f"{tally[key]:,}" for key in ("calls", "raised", "rounded", "wrong")))
    console = Console(width=110)
    console.print(table)
    held = results["memory_bytes"]
    console.print(
        "Memory in MB: " + ", ".join(f"{held[key] / 2**20:.0f} at the {key}" for key in ("start", "middle", "end"))
    )
    for name, tally in results["jobs"].items():
        for problem in tally["problems"]:
            console.print(f"{name}: {problem}", markup=False)
    for problem in results["left"] or ["Nothing was left over."]:
        console.print(problem, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints, writes `soak.json`, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"Expected --minutes above 0, got {options.minutes:g}. Pass 10, say.")
    warnings.simplefilter("ignore")  # of models that are computed one by one, after a fault in the forward pass
    sys.unraisablehook = lambda _: None  # an interrupt may come within a destructor
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # so that whatever is left there is seen
        found = soak(options.minutes, options.seed, Path(folder))
        tempfile.tempdir = None
    header = describe(f"python -m benchmarks.soak --minutes {options.minutes:g} --seed {options.seed}")
    results = header | {"seed": options.seed, "minutes": options.minutes} | found
    show(results)
    (options.output / "soak.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(results["left"]) or any(tally["wrong"] for tally in results["jobs"].values()))


if __name__ == "__main__":
    sys.exit(main())
