"""Names are found where data sets keep them, and only where their order is known."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from stochbn.cli.names import find_ids, ids_in, read_classes


class Named(TensorDataset):
    classes = ("a", "b")

    def __init__(self, **attributes):
        super().__init__(torch.arange(4.0))
        self.samples = [(f"{n}.png", 0) for n in range(4)]
        self.__dict__ |= attributes


class Stream(IterableDataset):
    ids = ("a",)

    def __iter__(self):
        return iter(torch.ones(3))


@pytest.mark.parametrize(
    ("loader", "ids"),
    [
        (DataLoader(Named()), ["0.png", "1.png", "2.png", "3.png"]),
        (DataLoader(Named(ids=[7, 8, 9, 10])), ["7", "8", "9", "10"]),
        (DataLoader(Subset(Subset(Named(), [3, 1, 0]), [1, 0])), ["1.png", "3.png"]),
        (DataLoader(Named(), shuffle=True), None),
        (DataLoader(Named(ids=["too", "few"], samples=None)), None),
        (DataLoader(Named(samples=[1, 2, 3, 4])), None),
        (DataLoader(TensorDataset(torch.ones(2))), None),
        (DataLoader(Stream()), None),
    ],
)
def test_ids_of_a_data_set(loader, ids):
    assert find_ids(loader) == ids


@pytest.mark.parametrize(
    ("third", "ids"),
    [
        (torch.tensor([[1], [2]]), []),
        (torch.tensor([0.5, 1.0]), []),  # weights
        (torch.tensor([True, False]), []),  # a mask
        ([torch.ones(1), torch.ones(1)], []),
        ("ab", []),
        (["a\ud800", 3], ["a?", "3"]),  # a file name that is no text
    ],
)
def test_ids_in_a_batch(third, ids):
    assert ids_in((torch.ones(2, 1), torch.ones(2), third)) == ids
    assert ids_in(torch.ones(3, 3)) == ids_in((torch.ones(2, 1), torch.ones(2))) == []


def test_names_of_classes(tmp_path):
    assert read_classes(None, DataLoader(Subset(Named(), [0]))) == ["a", "b"]
    assert read_classes(None, DataLoader(Named(classes=torch.ones(2)))) is None
    (tmp_path / "names.txt").write_text("c\nd\n")
    assert read_classes(tmp_path / "names.txt", DataLoader(Named())) == ["c", "d"]
