"""Draws as networks: slices, and the model that they belong to."""

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import small_cnn


def test_slices_of_draws(stats: stochbn.Factorized) -> None:
    draws = stats.sample(10, seed=0)
    assert len(draws[2:5]) == 3
    assert draws[2:5].excluded == draws.excluded
    assert torch.equal(draws[4]["1.running_mean"], draws[2:5][2]["1.running_mean"])


def test_distribution_of_another_model(stats: stochbn.Factorized) -> None:
    draws = stats.sample(2, seed=0)
    wider = small_cnn()
    wider[7] = nn.BatchNorm1d(12)
    with pytest.raises(ValueError, match=r"of another size: '7.running_mean \(10 channels, the model has 12\)'"):
        draws.match(wider)
    with pytest.raises(ValueError, match=r"missing: '0.running_mean'.*unexpected: '1.running_mean'"):
        draws.match(nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"this Sequential, got another model's \(missing: '12.running_mean'"):
        draws.match(nn.Sequential(*small_cnn(), nn.Identity(), nn.Identity(), nn.BatchNorm1d(3)))


def test_other_eps_and_long_lists(stats: stochbn.Factorized) -> None:
    other = small_cnn()
    other[4].eps = 1e-3
    with pytest.raises(ValueError, match="of another ε: '4'"):
        stats.sample(1, seed=0).match(other)
    deep = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(60)])
    with pytest.raises(ValueError, match=r"108 more, '9\.running_mean', '9\.running_var'") as caught:
        stats.sample(1, seed=0).match(deep)
    assert len(str(caught.value)) < 700


def test_excluded_layers_are_not_missed(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(model, batches, layers=["7"], progress=False)
    assert stats.excluded == ("1", "4")
    assert list(stats.sample(2, seed=0).match(model).buffers) == ["7.running_mean", "7.running_var"]
    assert stochbn.predict(model, stats, x).std.max() > 0


def test_draws_take_on_precision(stats: stochbn.Factorized) -> None:
    matched = stats.sample(2, seed=0).match(small_cnn().to(torch.bfloat16))
    assert {values.dtype for values in matched.buffers.values()} == {torch.bfloat16}
