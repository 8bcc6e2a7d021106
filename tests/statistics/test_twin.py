"""Twins: the same tensors in modules of their own."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stochbn.statistics.twin import make_twin, reorder_convolutions


class Holds(nn.Module):
    """Reaches its layers in more than one way."""

    def __init__(self, extra: object = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.in_a_list = [self.first, self.second]
        self.again = self.first
        self.register_buffer("offset", torch.ones(3))
        self.scale = torch.full((3,), 2.0)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.in_a_list:
            x = layer(x)
        return self.again(x) * self.scale + self.offset


@pytest.mark.parametrize("extra", [None, threading.Lock()], ids=["copied", "cannot be copied"])
def test_same_tensors_in_other_modules(extra: object) -> None:
    model = Holds(extra).train()
    twin = make_twin(model)
    assert twin.first is not model.first
    assert twin.again is twin.first
    assert [id(t) for t in (*twin.parameters(), *twin.buffers())] == [
        id(t) for t in (*model.parameters(), *model.buffers())
    ]
    assert twin.scale is model.scale
    x = torch.randn(2, 3)
    assert torch.equal(twin(x), model(x))
    twin.first.register_forward_hook(lambda *_: torch.zeros(2, 3))
    twin.extra = 1
    assert model.training
    assert not twin.training
    assert not model.first._forward_hooks
    assert model.extra is extra
    if extra is None:  # references besides the registered ones lead to the twin, too
        assert twin.in_a_list[0] is twin.first


def test_weights_that_are_computed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    assert torch.equal(make_twin(model)(x), model(x))


def test_reordered_convolutions_are_the_twins_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    twin = make_twin(model)
    assert reorder_convolutions(twin)
    assert twin[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(twin(x), model(x))
    assert not reorder_convolutions(make_twin(nn.Linear(2, 2)))
