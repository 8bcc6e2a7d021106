"""An experiment's networks, one after the other or several at a time: each is trained and at once evaluated.

Whatever ends it, nothing is lost but the epoch or the method that was being computed: `reproduce` goes on from there.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stochbn.experiments.data.sources import check_writable
from stochbn.experiments.evaluation.evaluate import diagnose, evaluate_network, load_splits
from stochbn.experiments.evaluation.plan import Run, plan, show, summarise
from stochbn.experiments.training.checkpoints import LockedError, checkpoint_path, is_locked, locked
from stochbn.experiments.training.recipes import Experiment
from stochbn.experiments.training.train import train

LOOKS = 10.0  # seconds between two looks at a network that another process is at work on


class QueueError(Exception):
    """Some networks of an experiment could not be made."""


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    jobs: int = 1,
    num_samples: int | None = None,
    data: Path | None = None,
    make_all: "MakeAll | None" = None,
    console: Console | None = None,
) -> None:
    """Trains every network of an experiment, evaluates each as soon as it is trained, and measures the first closely.

    What has been done is not done again. With several jobs each network has a process of its own, with one thread: on
    few cores that makes the most of them. There the others go on if one fails. A single job runs in this process, with
    the threads that torch has. A network that another process is at work on is left to it. With `make_all` another
    engine makes the networks, so many at a time. The other arguments are those of `evaluate`.

    Raises:
        ValueError: `jobs` is below 1.
        QueueError: Some networks could not be made; the message says why.
    """
    if jobs < 1:
        raise ValueError(f"Expected at least 1 job, got {jobs}. Pass the number of cores, say.")
    console = console or Console()
    check_writable(folder)
    splits = load_splits(experiment.recipe, data)  # before several processes would fetch the same files
    runs = plan(experiment, folder, num_samples=num_samples)
    show(runs, jobs, console)
    make = Maker(experiment, folder, num_samples, data)
    left = [run for run in runs if run.state != "done"]
    failures = make_all(make, left, console) if make_all else _make_all(make, left, jobs, console)
    if failures:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise QueueError(f"Expected to make all networks, got {len(failures)} failures ({reasons}). Start it again.")
    diagnose(experiment, folder, num_samples=num_samples, splits=splits, console=console)


@dataclass(frozen=True)
class Maker:
    """Trains and evaluates one network, in whatever process."""

    experiment: Experiment
    folder: Path
    num_samples: int | None
    data: Path | None

    def __call__(self, run: Run, console: Console) -> None:
        path = checkpoint_path(run.recipe, run.seed)
        check_writable(path.parent)
        with locked(path, run.name):  # for both: meanwhile a plan shows it as running, and no other queue takes it up
            train(run.recipe, run.seed, folder=self.data, console=console, lock=False)
            options: dict[str, Any] = {"num_samples": self.num_samples, "data": self.data, "console": console}
            evaluate_network(self.experiment, run.recipe, run.seed, self.folder, **options)

    def plan(self) -> list[Run]:
        return plan(self.experiment, self.folder, num_samples=self.num_samples)


MakeAll = Callable[[Maker, list[Run], Console], dict[str, str]]  # makes networks, and returns why some failed, by name


def _make_all(make: Maker, left: list[Run], jobs: int, console: Console) -> dict[str, str]:
    """Makes networks, in their order, and returns why some failed, by name."""
    failures: dict[str, str] = {}
    workers: dict[Connection, tuple[Run, BaseProcess]] = {}
    try:
        while left or workers:
            for run in list(left):
                if is_locked(checkpoint_path(run.recipe, run.seed)):  # by another queue, perhaps only just now
                    continue
                if jobs == 1:
                    console.rule(run.name)
                    with suppress(LockedError):
                        make(run, console)
                        left.remove(run)
                    continue
                if len(workers) == jobs:
                    break
                workers |= _start(make, run)
                left.remove(run)
            for pipe in wait(list(workers), LOOKS) if left or workers else []:
                assert isinstance(pipe, Connection)
                run, process = workers[pipe]
                try:
                    kind, text = pipe.recv()
                except EOFError:
                    process.join()
                    del workers[pipe]
                    if process.exitcode:
                        failures.setdefault(run.name, f"its process ended with code {process.exitcode}")
                    kind, text = "line", summarise(make.plan(), jobs)
                if kind == "failure":
                    failures[run.name] = text
                elif kind == "locked":
                    left.append(run)
                text = text.removeprefix(f"{run.name}: ")  # which an evaluation's lines have
                console.print(f"{run.name}: {text}", highlight=False, markup=False, soft_wrap=True)
    finally:
        for _, process in workers.values():
            process.terminate()  # at any moment: what is written is whole
            process.join()
    return failures


def _start(make: Maker, run: Run) -> dict[Connection, tuple[Run, BaseProcess]]:
    # A fresh interpreter each: a fork would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(make, run, sender), name=run.name)
    with _leaving_interrupts_to_the_parent():
        process.start()
    sender.close()  # the worker's own end is then the only one, and its exit the end of the pipe
    return {receiver: (run, process)}


def _work(make: Maker, run: Run, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        make(run, Console(file=_Lines(pipe), width=400))
    except LockedError as error:
        pipe.send(("locked", str(error)))
    except Exception as error:
        pipe.send(("failure", " ".join(str(error).split()) or type(error).__name__))
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, also if that was killed: nobody could stop it otherwise."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _leaving_interrupts_to_the_parent() -> Iterator[None]:
    """Lets processes that start here ignore Ctrl-C, which the terminal sends to all; the parent then ends them."""
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be set
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Lines(StringIO):
    """Sends what is written to it through a pipe, line by line."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe = pipe
        self.rest = ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.pipe.send(("line", line))
        return len(text)
