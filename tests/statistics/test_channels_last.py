"""Weights are reordered only where nothing notices."""

import pytest
import torch
from torch import nn

from oracles import small_cnn
from stochbn.statistics.channels_last import LAYOUT_DEPENDENT, RefusingLayouts, channels_last_weights


def test_weights_of_convolutions_are_reordered_and_equal() -> None:
    model = small_cnn()
    weights = channels_last_weights(model)
    assert set(weights) == {"0.weight", "3.weight"}
    for name, weight in weights.items():
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(weight, model.get_parameter(name))
    assert not model[3].weight.is_contiguous(memory_format=torch.channels_last)  # its own stays where it is


def test_weights_that_lie_so_already_are_the_models_own() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    assert channels_last_weights(model)["weight"].data_ptr() == model.weight.data_ptr()


def test_calls_that_read_the_layout_are_refused() -> None:
    x = torch.ones(2, 3)
    with RefusingLayouts():
        assert torch.equal(x + 1, torch.full((2, 3), 2.0))
        for call in (x.stride, x.numpy, lambda: x.as_strided((2,), (1,)), x.data_ptr):
            with pytest.raises(NotImplementedError, match="lies in memory"):
                call()
    assert torch.Tensor.stride in LAYOUT_DEPENDENT
    assert x.stride() == (3, 1)
