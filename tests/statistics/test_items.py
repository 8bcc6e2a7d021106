"""Items keep their structure, and their examples stay together."""

from collections import namedtuple

import pytest
import torch
from torch import Tensor

from stochbn.statistics.items import describe, map_leaves, num_examples, rows
from stochbn.statistics.mini_batches import mini_batches

Pair = namedtuple("Pair", "x y")


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
