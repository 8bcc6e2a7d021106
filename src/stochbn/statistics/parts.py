"""A loader that several processes read in parts, and how they put together what each of them found.

A plain loader has one reader, who is alone and never waits for anybody.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from stochbn.statistics.items import concatenate, num_examples, tensors_in
from stochbn.statistics.mini_batches import check_loader, length

T = TypeVar("T")


class Peers(Protocol):
    """The readers of one loader: who one is among them, and what they have for each other. All make the same calls."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Returns the values of all, in their order."""

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """Merges the values of all in their order. The first gets the result, the others None."""

    def first(self, value: T | None) -> T:
        """Returns the first one's value."""

    def agree(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Raises if named values differ, and returns them; None is no opinion."""


class Alone:
    """The one reader of a plain loader."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def reduce(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        return value

    def first(self, value: T | None) -> T:
        return cast(T, value)

    def agree(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(values)


ALONE = Alone()


class Part:
    """What one of several readers has of a loader. To `fit`, `tune` and `predict` it is a loader like any other.

    Args:
        batches: Those of this reader.
        peers: All readers.
        batch_size: The loader's own, if it has one.
        num_examples: In these batches, if that is known.
        whole_length: How many batches the whole loader has. How a pass is computed depends on it, and must not depend
            on how many readers share them; so `length` returns it, and `len` how many there are to read.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        peers: Peers,
        *,
        batch_size: int | None = None,
        num_examples: int | None = None,
        whole_length: int | None = None,
    ) -> None:
        self.batches = batches
        self.peers = peers
        self.batch_size = batch_size
        self.num_examples = num_examples
        self.whole_length = whole_length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def read_by(self, peers: Peers) -> "Part":
        """Returns the same part, for a call of its readers in which they are known as `peers`."""
        part = copy.copy(self)
        part.peers = peers
        return part

    def replace(self, batches: Iterable[Any], *, factor: int = 1) -> "Part":
        """Returns the same part with other batches, of so many times the size, and without a length."""
        size = self.batch_size and self.batch_size * factor
        return Part(batches, self.peers, batch_size=size, num_examples=self.num_examples)

    def regroup(self, count: int) -> "Part":
        """Returns the same part with so many batches in one."""
        return self.replace(_join(self.batches, count), factor=count)

    def num_mini_batches(self, batch_size: int | None) -> int | None:
        """Returns how many mini-batches of M are in it, if that is known."""
        size = batch_size or self.batch_size
        return None if size is None or self.num_examples is None else self.num_examples // size


def peers_of(loader: Iterable[Any]) -> Peers:
    """Returns the readers of a loader."""
    return loader.peers if isinstance(loader, Part) else ALONE


def divide(count: int, sizes: Sequence[int | None]) -> list[int]:
    """Divides a number between readers as evenly as what they have allows; of None, one has enough.

    Examples:
        >>> divide(8, [None, None, None]), divide(8, [1, 9, 3])
        ([3, 3, 2], [1, 4, 3])
    """
    shares = [count if size is None else min(size, count) for size in sizes]
    # Those who have least come first, and leave what they lack to the others.
    order = sorted(range(len(sizes)), key=lambda reader: (shares[reader], -reader))
    for position, reader in enumerate(order):
        shares[reader] = min(shares[reader], count // (len(sizes) - position))
        count -= shares[reader]
    return shares


def slice_of(count: int, peers: Peers) -> range:
    """Returns which of `count` things in a row fall to a reader, who has them one after the other.

    Examples:
        >>> slice_of(5, ALONE)
        range(0, 5)
    """
    return range(count * peers.rank // peers.size, count * (peers.rank + 1) // peers.size)


def own(loader: Iterable[Any], peers: Peers) -> Part:
    """Takes a loader whose batches are all this reader's: others have loaders of their own."""
    if isinstance(loader, Part):
        return loader.read_by(peers)
    check_loader(loader)
    if isinstance(loader, DataLoader):
        return Part(loader, peers, batch_size=loader.batch_size, num_examples=_count(loader))
    if isinstance(loader, (list, tuple)):
        sizes = [_size(item) for item in loader]
        return Part(loader, peers, batch_size=sizes[0] if sizes else None, num_examples=sum(sizes))
    return Part(loader, peers, batch_size=getattr(loader, "batch_size", None))


def cut(loader: Iterable[Any], peers: Peers) -> Part:
    """Cuts a loader that all readers have into contiguous slices of whole batches, none twice, and returns one's own.

    Of a `DataLoader` only the own slice is read. If its order is random, it is the first reader's for all.
    """
    if isinstance(loader, Part):  # cut before
        return loader.read_by(peers)
    check_loader(loader)
    total = length(loader)
    # A stream has no places to start from, whatever it says of its length: its sampler yields without an end.
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    if total is None or is_stream:
        raise TypeError(
            f"Expected a loader with a length, to be cut between processes, got {type(loader).__name__}"
            f"{' of an IterableDataset' if is_stream else ''}. Pass a list, or a DataLoader over a data set with a "
            "length and indices."
        )
    peers.agree({"number of batches": total})
    mine = slice_of(total, peers)
    batches: Iterable[Any]
    size = getattr(loader, "batch_size", None)
    if isinstance(loader, DataLoader):
        batches, count = _cut_data_loader(loader, mine, peers)
    elif isinstance(loader, (list, tuple)):
        batches = loader[mine.start : mine.stop]
        # M is that of the first batch of all: one's own may be the last, which is smaller.
        size, count = _size(loader[0]) if loader else None, sum(map(_size, batches))
    else:
        batches, count = _Slice(loader, mine), None if mine else 0
    return Part(batches, peers, batch_size=size, num_examples=count, whole_length=total)


def _size(item: Any) -> int:
    """Returns how many examples a batch has; those of (x, y) are those of x, which is what will be fitted."""
    has_first = isinstance(item, (list, tuple)) and item and tensors_in(item[0])
    return num_examples(item[0] if has_first else item)


def _cut_data_loader(
    loader: "DataLoader[Any]", mine: range, peers: Peers
) -> tuple["DataLoader[Any] | list[Any]", int | None]:
    """Returns a loader of some batches of another, and how many examples these hold, if that is known."""
    batch_sampler: Any = loader.batch_sampler
    source = getattr(batch_sampler, "sampler", loader.sampler)
    if isinstance(source, DistributedSampler):
        raise ValueError(
            "Expected a loader of all inputs, got one with a DistributedSampler, which has cut them between processes "
            "already, and repeats some. Leave the sampler out."
        )
    name = "sampler" if batch_sampler is None else "batch_sampler"
    sampler: Any = getattr(loader, name)
    order: Iterable[Any]
    count = None
    if type(batch_sampler) is BatchSampler and type(source) is SequentialSampler:
        order, size = _Successive(mine, batch_sampler.batch_size, len(source)), batch_sampler.batch_size
        count = min(mine.stop * size, len(source)) - min(mine.start * size, len(source))
    else:
        order = peers.first(_list_order(loader, sampler) if peers.rank == 0 else None)[mine.start : mine.stop]
        count = sum(map(len, order)) if batch_sampler is not None else None
    if not mine:
        return [], 0
    # A copy keeps what the loader is, workers and all; torch refuses to set its sampler by the usual way.
    part = copy.copy(loader)
    part.__dict__[name] = order
    part.__dict__["_iterator"] = None
    return part, count


def _list_order(loader: "DataLoader[Any]", sampler: Iterable[Any]) -> list[Any]:
    """Lists what a loader would read if it were iterated over now."""
    # It would take a number for its workers before it asks for an order, from the same generator.
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
    return list(sampler)


class _Slice:
    """Some successive batches of what can be iterated over, however often it is."""

    def __init__(self, whole: Iterable[Any], places: range) -> None:
        self._whole = whole
        self._places = places

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._whole, self._places.start, self._places.stop)

    def __len__(self) -> int:
        return len(self._places)


class _Successive:
    """Some successive batches of the indices 0, 1, …, `total`; to count up to the first of 10⁹ would take a while."""

    def __init__(self, places: range, batch_size: int, total: int) -> None:
        self._places = places
        self._batch_size = batch_size
        self._total = total

    def __iter__(self) -> Iterator[list[int]]:
        for place in self._places:
            start = place * self._batch_size
            yield list(range(start, min(start + self._batch_size, self._total)))

    def __len__(self) -> int:
        return len(self._places)


def _count(loader: "DataLoader[Any]") -> int | None:
    """Returns how many examples a DataLoader yields, if it knows."""
    batches, sampler = length(loader), cast(Sequence[Any], loader.sampler)
    if batches is None or type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return None
    return batches * loader.batch_size if loader.drop_last else length(sampler)


def _join(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yields so many batches in one; the last may be of fewer."""
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, count)):
        joined = group[0]
        for item in group[1:]:
            joined = concatenate(joined, item)
        yield joined
