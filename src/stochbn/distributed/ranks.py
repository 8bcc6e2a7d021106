"""The ranks of a torch.distributed group, and what they have for each other.

Everything goes as pickled objects of CPU tensors, which any backend takes. All exchanges but those of `reduce` are the
same collective call. So a rank that fails can tell the others at any point: it takes part in the next exchange with its
error in place of a value.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from stochbn.distributions.storage import brief

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FUNCTIONS = ("fit", "tune", "predict")  # that stochbn and stochbn.distributed have both

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed, or does not answer."""


class Ranks:
    """The ranks of a group, numbered within it; what `Part` calls its peers.

    Args:
        group: Theirs; None for all ranks of the job.
        task: What they do, for messages.

    Raises:
        RuntimeError: There is no group, or this process is not in it.
    """

    def __init__(self, group: "ProcessGroup | None", task: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            plain = f", or stochbn.{task} for one process" if task in FUNCTIONS else ""
            raise RuntimeError(
                f"Expected a process group to {task} in, got none. Call torch.distributed.init_process_group() "
                f"first{plain}."
            )
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise RuntimeError(
                f"Expected to be called by the ranks of the group only, got a call by rank {dist.get_rank()}, which is "
                "not in it. Leave this rank out."
            )
        self.size = dist.get_world_size(self._group)
        self._task = task

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in their order, on each of them."""
        return [cast(T, found) for _, found in self._exchange(None, value)]

    def gather_to(self, rank: int, value: T) -> list[T] | None:
        """Returns the values of all ranks on one of them, and None on the others."""
        self.gather(None)  # nobody has failed
        found: list[Any] | None = [None] * self.size if rank == self.rank else None
        with self._explaining():
            dist.gather_object(value, found, dst=self._number(rank), group=self._group)
        return found

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """Merges values in the order of the ranks, by pairs: nobody has to hold, or to wait for, more than log₂ W."""
        step = 1
        while step < self.size:
            with self._explaining():
                if self.rank % (2 * step):
                    dist.send_object_list([value], dst=self._number(self.rank - step), group=self._group)
                    return None
                received: list[Any] = [None]
                if self.rank + step < self.size:
                    dist.recv_object_list(received, src=self._number(self.rank + step), group=self._group)
            if self.rank + step < self.size:
                value = merge(value, received[0])
            step *= 2
        return value

    def first(self, value: T | None) -> T:
        """Returns the value of rank 0."""
        self.gather(None)  # nobody has failed
        sent = [value if self.rank == 0 else None]
        with self._explaining():
            dist.broadcast_object_list(sent, src=self._number(0), group=self._group)
        return cast(T, sent[0])

    def agree(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Raises if ranks have different values under a name, and says which; returns the values that they have."""
        found = self.gather(dict(values))
        agreed: dict[str, Any] = {}
        for name in dict.fromkeys(name for each in found for name in each):
            known = {rank: each.get(name) for rank, each in enumerate(found) if each.get(name) is not None}
            agreed[name] = next(iter(known.values()), None)
            for rank, value in known.items():
                if value != agreed[name]:
                    remedy = f" Call stochbn.distributed.{self._task} with the same on all."
                    raise ValueError(
                        f"Expected the same {name} on every rank, got {agreed[name]} on rank {next(iter(known))} and "
                        f"{value} on rank {rank}.{remedy if self._task in FUNCTIONS else ''}"
                    )
        return agreed

    def tell(self, error: Exception) -> None:
        """Lets the other ranks know, in their next exchange, what ended this one."""
        if not isinstance(error, RankError) and not is_told(error):
            with suppress(RankError):  # nobody is left to be told
                self._exchange(brief(f"{type(error).__name__}: {error}"), None)
                _mark_told(error)

    def _exchange(self, problem: str | None, value: Any) -> list[tuple[str | None, Any]]:
        found: list[Any] = [None] * self.size
        with self._explaining():
            dist.all_gather_object(found, (problem, value), group=self._group)
        for rank, (other, _) in enumerate(found):
            if other is not None and problem is None:
                raise _mark_told(
                    RankError(f"Expected every rank to {self._task}, got an error on rank {rank}: {other}")
                )
        return found

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says what an error of the backend means."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"Expected every rank to {self._task}, got no answer from one within the group's timeout "
                f"({brief(error)}). It has died, or was too slow: look at what it printed, and start the job again."
            ) from error

    def _number(self, rank: int) -> int:
        """Returns the number of a rank among all of the job."""
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)


@contextmanager
def together(group: "ProcessGroup | None", task: str) -> Iterator[Ranks]:
    """Yields the ranks of a group, and lets them finish together: all of them, or none."""
    ranks = Ranks(group, task)
    try:
        yield ranks
    except Exception as error:
        ranks.tell(error)
        raise
    ranks.gather(None)


def is_told(error: Exception) -> bool:
    """Returns whether all ranks know of an error."""
    return getattr(error, "_is_told", False)


def _mark_told(error: Exception) -> Exception:
    error._is_told = True  # type: ignore[attr-defined]
    return error
