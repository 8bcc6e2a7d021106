"""Draws that are made ahead are those that are asked for, whatever came before."""

import pytest
import torch
from torch import nn

import stochbn
from stochbn.inference.engine import sampling
from stochbn.inference.engine.sampling import Sampler


def test_parts_of_a_seed_are_its_draws(
    model: nn.Module, stats: stochbn.Factorized, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FIRST_DRAWS", 3)
    monkeypatch.setattr(sampling, "BLOCK_NUMBERS", 1)
    expected = stats.sample(20, seed=2).match(model).buffers
    sampler = Sampler(model, stats, num_samples=20, seed=2)
    assert sampler.layers == tuple(stats.layers)
    for start, stop in ((0, 2), (5, 9), (2, 5), (19, 20), (0, 20)):
        taken = sampler.take(start, stop)
        assert all(torch.equal(values, expected[name][start:stop]) for name, values in taken.buffers.items())
        assert taken.indices.tolist() == list(range(start, stop))


def test_masks_begin_again(model: nn.Module, stats: stochbn.Factorized) -> None:
    sampler = Sampler(model, stats.sample(6, seed=0), num_samples=1, seed=0, num_masks=3)
    assert sampler.num_draws == 6
    assert sampler.take(1, 5).indices.tolist() == [1, 2, 0, 1]
