"""Draws are real mini-batches, each once before any comes again."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import flat, observed, of_channels
from stochbn.distributions.empirical import Thinned


def test_an_empirical_draw_is_a_mini_batch(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family="empirical", progress=False)
    truth = observed(model, batches).double().numpy()
    drawn = flat(stats.sample(12, seed=3), stats)
    nearest = [int(np.abs(truth - draw).max(axis=(1, 2)).argmin()) for draw in drawn]
    assert sorted(nearest) == list(range(12))  # each once, in some order
    assert nearest != list(range(12))
    np.testing.assert_allclose(drawn, truth[nearest], atol=1e-5)


def test_ghost_batches_give_the_same_observations(model: nn.Module, batches: list[Tensor]) -> None:
    together = [torch.cat(batches[:5]), torch.cat(batches[5:10]), torch.cat(batches[10:])]
    one = stochbn.fit(model, batches, family="empirical", progress=False)
    other = stochbn.fit(model, together, batch_size=16, family="empirical", progress=False)
    torch.testing.assert_close(one.observations, other.observations, rtol=1e-4, atol=1e-5)


def test_rounds_differ_and_draws_are_a_function_of_seed_and_index(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family="empirical", progress=False)
    whole = stats.sample(40, seed=1).buffers["1.running_mean"]
    parts = [stats.sample(count, seed=1, first=first).buffers["1.running_mean"] for first, count in ((0, 7), (7, 33))]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole[:12], whole[12:24])
    torch.testing.assert_close(whole[:12].sum(0), whole[12:24].sum(0))


@pytest.mark.parametrize("sizes", [[1] * 100, [7] * 15, [64, 3, 33], [300]])
def test_what_is_kept_is_spread_evenly(sizes: list[int]) -> None:
    kept = Thinned(10)
    start = 0
    for size in sizes:
        kept.add(torch.arange(start, start + size, dtype=torch.float64).view(-1, 1, 1).expand(-1, 2, 1))
        start += size
    assert len(kept._rows) < 20
    rows = kept.distribution(of_channels(1)).observations[:, 0, 0]
    assert len(rows) == 10
    steps = rows.diff()
    assert steps.min() > 0
    assert steps.max() <= 2 * start / 10
    assert rows[0] < start / 10
    assert rows[-1] > start * 0.8
