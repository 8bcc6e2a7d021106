"""Cut between readers, a loader is still itself: nothing twice, nothing lost, in order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from stochbn.statistics.mini_batches import length
from stochbn.statistics.parts import ALONE, Alone, Part, cut, divide, own, peers_of, slice_of


class Reader(Alone):
    """One of several who agree on everything; the first lists a random order for all."""

    order: list[Any] | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def first(self, value: Any) -> Any:
        Reader.order = value if self.rank == 0 else Reader.order
        return Reader.order


def read(loader: Any, size: int) -> list[list[list[int]]]:
    """Returns what each of several readers reads, batch by batch."""
    return [[list(batch[0].flatten().int()) for batch in cut(loader, Reader(rank, size))] for rank in range(size)]


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count).float().view(-1, 1))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 100},
        {"batch_size": 4, "shuffle": True},
        {"batch_sampler": [[1, 0], [5], [2, 3]]},
        {"batch_size": None, "sampler": [[0, 1], [2], [3, 4, 5]]},
    ],
)
def test_readers_have_contiguous_slices_of_whole_batches(options: dict[str, Any], size: int) -> None:
    def load() -> "DataLoader[Any]":
        return DataLoader(numbers(22), generator=torch.Generator().manual_seed(1), **options)

    found = read(load(), size)
    assert [batch for part in found for batch in part] == [list(batch[0].flatten().int()) for batch in load()]
    lengths = [len(part) for part in found]
    assert max(lengths) - min(lengths) <= 1


def test_a_part_knows_its_size_and_that_of_the_whole() -> None:
    parts = [cut(DataLoader(numbers(22), 4), Reader(rank, 2)) for rank in range(2)]
    assert [part.num_examples for part in parts] == [12, 10]
    assert [part.num_mini_batches(None) for part in parts] == [3, 2]
    assert [part.num_mini_batches(5) for part in parts] == [2, 2]
    assert [len(part) for part in parts] == [3, 3]
    assert [length(part) for part in parts] == [6, 6]
    assert [len(list(part)) for part in parts] == [3, 3]
    assert [len(list(part)) for part in parts] == [3, 3]  # it can be read again
    assert cut(parts[0], ALONE).batches is parts[0].batches  # once is enough
    assert cut(DataLoader(numbers(3), 4), Reader(0, 2)).num_examples == 0


def test_lists_and_other_iterables_are_cut_too() -> None:
    batches = [torch.full((2, 1), float(number)) for number in range(5)]
    for loader in (batches, DataLoader(batches, batch_size=None)):
        parts = [list(cut(loader, Reader(rank, 2))) for rank in range(2)]
        assert [len(part) for part in parts] == [2, 3]
        assert torch.equal(torch.cat(parts[0] + parts[1]), torch.cat(batches))

    labelled = [(torch.zeros(size, 1), torch.zeros(size)) for size in (4, 4, 4, 3)]
    for cuttable in (labelled, tuple(labelled)):
        cuts = [cut(cuttable, Reader(rank, 4)) for rank in range(4)]
        assert [part.num_examples for part in cuts] == [4, 4, 4, 3]
        assert {part.batch_size for part in cuts} == {4}  # of the whole, also where only the last one is
    assert cut([("a name", torch.zeros(5, 1))], ALONE).num_examples == 5  # call= may know what to do with it

    class Reversed:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[torch.Tensor]:
            return reversed(batches)

    assert torch.equal(next(iter(cut(Reversed(), Reader(1, 2)))), batches[2])


def test_what_cannot_be_cut() -> None:
    data = numbers(10)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="a DistributedSampler, which has cut them between processes already"):
        cut(DataLoader(data, 2, sampler=sampler), Reader(0, 2))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(TypeError, match="a loader with a length, to be cut between processes, got DataLoader"):
        cut(DataLoader(Stream()), Reader(0, 2))

    class Counted(Stream):
        def __len__(self) -> int:
            return 8

    with pytest.raises(TypeError, match=r"got DataLoader of an IterableDataset. Pass a list, or"):
        cut(DataLoader(Counted(), 2), Reader(0, 2))  # its sampler has no end


def test_own_loaders_say_how_much_they_hold() -> None:
    data = numbers(22)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=4, rank=0)
    for loader, size, count in (
        (DataLoader(data, 4), 4, 22),
        (DataLoader(data, 4, drop_last=True), 4, 20),
        (DataLoader(data, 4, sampler=sampler), 4, 6),
        (DataLoader(data, batch_sampler=[[0, 1]]), None, None),
        ([torch.zeros(3, 1), torch.zeros(2, 1)], 3, 5),
        ([(torch.zeros(3, 1), torch.zeros(3))], 3, 3),
        ([], None, 0),
        (iter([]), None, None),
    ):
        part = own(loader, ALONE)
        assert (part.batch_size, part.num_examples) == (size, count)
        assert own(part, ALONE).batches is loader
    with pytest.raises(TypeError, match="Expected a DataLoader or another iterable of batches"):
        own(data, ALONE)  # type: ignore[arg-type]


def test_batches_are_put_together() -> None:
    part = Part([torch.full((2, 1), float(n)) for n in range(5)], ALONE, batch_size=2, num_examples=10, whole_length=5)
    grouped = part.regroup(2)
    assert [len(batch) for batch in grouped] == [4, 4, 2]
    assert (grouped.batch_size, grouped.num_examples) == (4, 10)
    with pytest.raises(TypeError, match="no len"):
        len(grouped)


@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_shares_and_slices_add_up(count: int) -> None:
    readers = [Reader(rank, 5) for rank in range(5)]
    assert sum(divide(count, [None] * 5)) == count
    sizes = [3, 9, 0, 1, 3]
    found = divide(count, sizes)
    assert sum(found) == count
    assert all(share <= size for share, size in zip(found, sizes, strict=True))
    assert [i for reader in readers for i in slice_of(count, reader)] == list(range(count))


def test_a_plain_loader_has_one_reader() -> None:
    assert peers_of([]) is ALONE
    assert ALONE.gather(3) == [3]
    assert ALONE.reduce(3, max) == ALONE.first(3) == 3
    assert ALONE.agree({"a": None}) == {"a": None}
