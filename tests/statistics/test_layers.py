"""Which BatchNorm layers are found, by name, pattern and predicate."""

import pytest
import torch
from torch import Tensor, nn

import stochbn
from stochbn.statistics.layers import find_layers


def test_no_batch_norm(batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"with batch normalization, got Linear without any.*predict\(model, None"):
        stochbn.fit(nn.Linear(2, 2), batches)


def test_no_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"got '0' with track_running_stats=False.*layers=lambda"):
        stochbn.fit(model, [torch.randn(4, 2)] * 2)
    for _ in range(50):
        model(torch.randn(9, 2))
    stats = stochbn.fit(
        model, [torch.randn(9, 2)] * 2, layers=lambda name, layer: layer.running_mean is not None, progress=False
    )
    assert list(stats.layers) == ["1"]
    assert stats.excluded == ("0",)


def test_lazy_layer() -> None:
    with pytest.raises(ValueError, match=r"got the lazy '0'\. Run the model once"):
        find_layers(nn.Sequential(nn.LazyBatchNorm1d()))


def test_layers_by_name_pattern_and_predicate(model: nn.Module) -> None:
    assert list(find_layers(model)) == ["1", "4", "7"]
    assert list(find_layers(model, "1")) == ["1"]
    assert list(find_layers(model, ["[47]"])) == ["4", "7"]
    assert list(find_layers(model, lambda name, layer: isinstance(layer, nn.BatchNorm1d))) == ["7"]


def test_layers_that_match_nothing(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"got \['9'\], which match none. The model has '1', '4', '7'"):
        find_layers(model, ["1", "9"])
    with pytest.raises(ValueError, match="at least one BatchNorm layer, got none of 3"):
        find_layers(model, lambda name, layer: False)
    with pytest.raises(ValueError, match="got none of 3"):
        find_layers(model, [])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="got none of 3"):  # a wholly frozen model
        find_layers(model, lambda name, layer: layer.weight.requires_grad)


class FrozenBatchNorm2d(nn.Module):
    """As in detection libraries."""


def test_frozen_layers_are_named() -> None:
    with pytest.raises(ValueError, match=r"Expected BatchNorm layers, got '0\.bn', '1', which are frozen"):
        stochbn.fit(nn.Sequential(nn.ModuleDict({"bn": FrozenBatchNorm2d()}), FrozenBatchNorm2d()), [])


def test_names_that_match_nothing_are_listed_with_the_last_ones() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(12)))
    with pytest.raises(ValueError, match=r"The model has '0', '1', '2', '3', 6 more, '10', '11'\."):
        find_layers(model, ["head.*"])
