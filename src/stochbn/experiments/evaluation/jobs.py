"""Jobs → files: each file is made once, and again when what it is made of has changed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from stochbn.experiments.files import File, is_current, provenance


@dataclass(frozen=True)
class Job:
    """A file to make."""

    title: str  # what a log says of it
    path: Path  # where the file lies
    identity: Mapping[str, Any]  # what it is made of, in JSON values; a file whose header has the same is left alone
    make: Callable[[], File]  # computes the file; its header need hold neither the identity nor the provenance


def complete(jobs: Iterable[Job], *, command: str, console: Console) -> None:
    """Makes the file of every job that has none, one after the other, and writes each whole as soon as it is made.

    The files say that a user gets them by the command. Jobs from a generator are asked for one by one.
    """
    for job in jobs:
        if not is_current(job.path, job.identity):
            file = job.make()
            File({**file.header, **job.identity, **provenance(command)}, file.tensors).write(job.path)
        console.print(job.title, highlight=False, soft_wrap=True)
