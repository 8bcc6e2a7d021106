"""Mini-batches of M from loaders of any batches."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stochbn.statistics.mini_batches import mini_batches

Pair = namedtuple("Pair", "x y")


def numbers(*sizes: int) -> list[Tensor]:
    """Batches of the given sizes that count on from one to the next."""
    return list(torch.arange(sum(sizes)).split(sizes))


@pytest.mark.parametrize("sizes", [(8, 8, 8), (10, 10, 10, 7), (4, 4, 2), (7, 7, 7, 7, 3)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_same_groups_as_a_loader_of_that_size(sizes: tuple[int, ...], size: int) -> None:
    groups = [g for item, n, m in mini_batches(numbers(*sizes), batch_size=size) for g in item.view(n, m)]
    expected = [b for b in torch.arange(sum(sizes)).split(size) if len(b) == size]
    assert torch.equal(torch.stack(groups), torch.stack(expected))


def test_size_comes_from_the_loader_then_from_the_first_batch() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    assert [(n, m) for _, n, m in mini_batches(loader)] == [(1, 4), (1, 4)]
    assert [(n, m) for _, n, m in mini_batches(numbers(5, 5, 3))] == [(1, 5), (1, 5)]


def test_num_batches_stops_early_and_reads_no_further() -> None:
    read = []

    def loader():
        for batch in numbers(8, 8, 8):
            read.append(len(batch))
            yield batch

    assert [n for _, n, _ in mini_batches(loader(), batch_size=4, num_batches=3)] == [2, 1]
    assert read == [8, 8]


def test_nested_items_are_cut_together() -> None:
    batch = {"x": torch.arange(5), "pair": Pair(torch.arange(5) + 10, "label"), "scale": torch.tensor(2.0)}
    items = [item for item, _, _ in mini_batches([batch, batch], batch_size=2)]
    assert items[1]["x"].tolist() == [4, 0, 1, 2, 3, 4]
    assert items[1]["pair"].x.tolist() == [14, 10, 11, 12, 13, 14]
    assert items[1]["pair"].y == "label"
    assert items[1]["scale"] == 2


@pytest.mark.parametrize("sizes", [(3,), (3, 8)])
def test_batch_smaller_than_batch_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"at least 4 examples, got one of 3.*smaller batch_size"):
        list(mini_batches(numbers(*sizes), batch_size=4))


def test_short_batch_in_the_middle() -> None:
    with pytest.raises(ValueError, match="got one of 3; only the last may be smaller"):
        list(mini_batches(numbers(4, 3, 4)))


def test_batches_of_size_1() -> None:
    with pytest.raises(ValueError, match="at least 2 examples, got 1"):
        list(mini_batches(numbers(1, 1)))


@pytest.mark.parametrize("data", [torch.ones(4, 2), TensorDataset(torch.ones(4)), "path", nn.Linear(1, 1)])
def test_data_that_is_not_batches(data: object) -> None:
    with pytest.raises(
        TypeError, match=r"iterable of batches, got .*DataLoader\(dataset, batch_size=M, shuffle=True\)"
    ):
        list(mini_batches(data))


def test_arrays_are_no_tensors() -> None:
    with pytest.raises(TypeError, match=r"tensors or batches of them, got ndarray\. Pass torch.from_numpy\(x\)"):
        list(mini_batches(np.ones((4, 2))))


def test_all_of_a_slice_may_be_the_smaller_last_batch() -> None:
    assert list(mini_batches([torch.zeros(3, 1)], batch_size=4, is_slice=True)) == []
    with pytest.raises(ValueError, match="batches of at least 4 examples, got one of 3; only the last may be smaller"):
        list(mini_batches([torch.zeros(3, 1), torch.zeros(3, 1)], batch_size=4, is_slice=True))
    with pytest.raises(ValueError, match="batches of at least 4 examples, got one of 3"):
        list(mini_batches([torch.zeros(3, 1)], batch_size=4))
