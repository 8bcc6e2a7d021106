"""The processes that torchrun starts: all run the command together, and the first one prints and writes."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import stochbn
from stochbn.distributed.ranks import Ranks, together
from stochbn.statistics.parts import ALONE, Peers

COMMANDS = ("fit", "predict", "train", "tune")

T = TypeVar("T")


def is_joined() -> bool:
    """Returns whether this process is one of a job."""
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Returns whether it prints and writes: alone, or as rank 0 of a job."""
    return not is_launched() or os.environ.get("RANK") == "0"


def is_launched() -> bool:
    """Returns whether torchrun started it."""
    return dist.is_available() and dist.is_torchelastic_launched()


@contextmanager
def joined(command: str) -> Iterator[None]:
    """Joins the job that torchrun started, if it did, for a command; an error of one process ends all of them."""
    if not is_launched() or command.startswith("-"):
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # which --device cuda means
    is_own = not dist.is_initialized()
    if is_own:
        dist.init_process_group("gloo")  # for what stochbn exchanges, wherever the network runs
    try:
        with (
            open(os.devnull, "w") as nowhere,
            nullcontext() if is_first() else redirect_stdout(nowhere),
            together(None, command),
        ):
            if command not in COMMANDS:
                raise ValueError(
                    f"Expected one of {', '.join(COMMANDS)} with torchrun, got {command!r}, which one process does. "
                    "Leave torchrun out."
                )
            yield
    finally:
        if is_own:
            dist.destroy_process_group()


def library() -> Any:
    """Returns where `fit`, `tune` and `predict` are."""
    return stochbn.distributed if is_joined() else stochbn


def shard(loader: T) -> T | Iterable[Any]:
    """Returns this process's slice of a loader."""
    return stochbn.distributed.shard(loader) if is_joined() else loader  # type: ignore[arg-type]


def peers(command: str) -> Peers:
    """Returns the processes of the job, who run a command."""
    return Ranks(None, command) if is_joined() else ALONE
