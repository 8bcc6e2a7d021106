"""Draws are real mini-batches, each once before any comes again."""

from pathlib import Path

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


def count_up(start: int, size: int) -> Tensor:
    """Rows that say which they are, (size, 2, 1)."""
    return torch.arange(start, start + size, dtype=torch.float64).view(-1, 1, 1).expand(-1, 2, 1)


@pytest.mark.parametrize("sizes", [[5, 4], [19, 1], [30, 70], [61, 0, 39], [7, 200, 33], [333, 334, 333]])
def test_parts_that_know_where_they_start_keep_what_the_whole_keeps(sizes: list[int]) -> None:
    whole, start, parts = Thinned(10), 0, []
    for size in sizes:
        part = Thinned(10)
        part.start_at(start)
        for rows in (count_up(start, size // 3), count_up(start + size // 3, size - size // 3)):
            part.add(rows)
            whole.add(rows)
        parts.append(part)
        start += size
    for part in parts[1:]:
        parts[0].merge(part)
    kept, expected = (one.distribution(of_channels(1)).observations for one in (parts[0], whole))
    assert torch.equal(kept, expected)


def test_parts_that_do_not_know_are_kept_in_proportion() -> None:
    one, other = Thinned(10), Thinned(10)
    one.add(count_up(0, 33))
    other.add(count_up(0, 330))
    one.merge(other)
    kept = one.distribution(of_channels(1)).observations[:, 0, 0]
    assert len(kept) == 10
    assert (kept.diff() < 0).sum() <= 1  # one part after the other
    assert kept.max() > 250


@pytest.mark.parametrize("cut", [2, 5, 7])
def test_merged_fits_keep_what_one_fit_keeps(model: nn.Module, batches: list[Tensor], cut: int) -> None:
    options = {"family": "empirical", "progress": False}
    whole, one, other = (stochbn.fit(model, part, **options) for part in (batches, batches[:cut], batches[cut:]))
    merged = one.merge(other)
    assert torch.equal(merged.observations, whole.observations)
    torch.testing.assert_close(merged.centre, whole.centre, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.std, whole.std, rtol=1e-9, atol=1e-12)
    fewer = stochbn.fit(model, batches, num_kept=4, **options)
    assert torch.equal(one.merge(other, num_kept=4).observations, fewer.observations)
    with pytest.raises(ValueError, match="num_kept of at least 1, got 0"):
        one.merge(other, num_kept=0)


def test_a_fit_that_kept_few_thins_the_other(model: nn.Module, batches: list[Tensor]) -> None:
    few = stochbn.fit(model, batches[:6], family="empirical", num_kept=3, progress=False)
    all_kept = stochbn.fit(model, batches[6:], family="empirical", progress=False)
    merged = few.merge(all_kept)
    assert merged.num_batches == 12
    assert len(merged.observations) == 6
    assert torch.equal(merged.observations[:3], few.observations)


def test_families_do_not_merge_with_each_other(model: nn.Module, batches: list[Tensor]) -> None:
    one, other = (stochbn.fit(model, batches, family=f, progress=False) for f in ("empirical", "lowrank"))
    with pytest.raises(ValueError, match="with one family and batch size, got different families"):
        one.merge(other)


def test_a_loaded_fit_merges_as_the_fit_itself(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    one, other = (stochbn.fit(model, part, family="empirical", progress=False) for part in (batches[:5], batches[5:]))
    other.save(tmp_path / "other.safetensors")
    merged = one.merge(stochbn.load(tmp_path / "other.safetensors"))
    assert torch.equal(merged.observations, one.merge(other).observations)
    assert torch.equal(merged.std, one.merge(other).std)
