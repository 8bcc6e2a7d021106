from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stochbn.statistics.batches import (
    call_on_inputs,
    call_on_item,
    check_whole,
    describe,
    map_leaves,
    mini_batches,
    num_examples,
    rows,
)

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


def test_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"leading batch dimension, got list\(str, Tensor\[\]\)"):
        num_examples(["a", torch.tensor(1)])


def test_map_keeps_the_structure() -> None:
    item = Pair([torch.ones(2)], {"a": (torch.ones(1), None)})
    doubled = map_leaves(lambda a, b: a + b if isinstance(a, Tensor) else a, item, item)
    assert isinstance(doubled, Pair)
    assert doubled.x[0].tolist() == [2, 2]
    assert doubled.y["a"][1] is None
    assert describe(item) == "Pair(list(Tensor[2]), dict(a=tuple(Tensor[1], NoneType)))"


def test_lists_follow_their_examples_and_constants_stay_whole() -> None:
    batches = [
        {"x": torch.arange(5) + start, "names": [f"n{start + i}" for i in range(5)], "anchors": torch.ones(10, 4)}
        for start in (0, 5)
    ] + [{"x": torch.arange(10, 12), "names": ["n10", "n11"], "anchors": torch.ones(10, 4)}]
    for item, groups, size in mini_batches(batches, batch_size=2):
        assert len(item["x"]) == groups * size
        assert item["names"] == [f"n{i}" for i in item["x"].tolist()]
        assert item["anchors"].shape == (10, 4)
    assert rows({"x": torch.arange(10), "anchors": torch.ones(4)}, 2, 4)["anchors"].shape == (4,)


@pytest.mark.parametrize(
    "data", [torch.ones(4, 2), TensorDataset(torch.ones(4)), np.ones((4, 2)), "path", nn.Linear(1, 1)]
)
def test_data_that_is_not_batches(data: object) -> None:
    with pytest.raises(
        TypeError, match=r"iterable of batches, got .*DataLoader\(dataset, batch_size=M, shuffle=True\)"
    ):
        list(mini_batches(data))


def test_whole_numbers() -> None:
    assert check_whole("num_samples", np.int64(3), 1) == 3
    with pytest.raises(TypeError, match=r"num_samples to be a whole number, got 50\.0"):
        check_whole("num_samples", 50.0, 1)


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_default_calls() -> None:
    a, b = torch.tensor([3.0]), torch.tensor([1.0])
    assert call_on_item(nn.Identity(), (a, b)) is a
    assert call_on_item(nn.Identity(), [a, b]) is a
    assert call_on_item(nn.Identity(), a) is a
    assert call_on_item(Two(), {"a": a, "b": b}).item() == 2
    assert call_on_inputs(Two(), (a, b)).item() == 2
    assert call_on_inputs(Two(), {"b": a, "a": b}).item() == -2


def test_runtime_errors_of_the_default_call_name_the_remedy() -> None:
    with pytest.raises(
        RuntimeError, match=r"that Linear can take, got tuple\(Tensor\[2, 7\], Tensor\[2\]\).*shapes.*call="
    ):
        call_on_item(nn.Linear(3, 1), (torch.ones(2, 7), torch.ones(2)))


def test_faults_of_the_model_stay_what_they_are() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.absent(x)

    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(AttributeError, match=r"^'Broken' object has no attribute 'absent'"):
        call_on_item(Broken(), torch.ones(2))
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory"):
        call_on_item(Full(), torch.ones(2))


@pytest.mark.parametrize("item", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2), "c": torch.ones(2)}, "word"])
def test_call_that_does_not_fit_names_the_remedy(item: object) -> None:
    with pytest.raises(TypeError, match=r"that Two can take, got .* Pass call= .*call=lambda model, batch"):
        call_on_item(Two(), item)
