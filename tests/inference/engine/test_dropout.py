"""Hashed masks: uniform, independent, and of the same distribution as torch's own dropout."""

import math

import pytest
import torch
from scipy import stats as sps
from torch import nn
from torch.func import vmap

import stochbn
from stochbn.inference.engine.dropout import hashed_uniform

pytestmark = pytest.mark.usefixtures("path")  # each test on both

KINDS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]


def test_uniform_and_uncorrelated() -> None:
    values = torch.stack([hashed_uniform(7, torch.tensor(i), (1000,)) for i in range(50)])
    assert values.min() >= 0
    assert values.max() < 1
    assert sps.kstest(values.flatten(), "uniform").pvalue > 1e-3
    along_draws = torch.corrcoef(values)[~torch.eye(50, dtype=torch.bool)]
    assert along_draws.abs().max() < 5 / math.sqrt(1000)
    lagged = torch.corrcoef(torch.stack([values[:, :-1].flatten(), values[:, 1:].flatten()]))[0, 1]
    assert abs(lagged) < 4 / math.sqrt(values.numel())


def test_a_function_of_key_draw_and_position_also_under_vmap() -> None:
    indices = torch.arange(4)
    batched = vmap(lambda i: hashed_uniform(3, i, (2, 5)))(indices)
    single = torch.stack([hashed_uniform(3, i, (2, 5)) for i in indices])
    assert torch.equal(batched, single)
    assert not torch.equal(batched[0], batched[1])
    assert not torch.equal(hashed_uniform(4, indices[0], (2, 5)), single[0])


def masked(layer: nn.Module, x: torch.Tensor, num_samples: int) -> torch.Tensor:
    model = nn.Sequential(layer)
    samples = stochbn.predict(model, None, x, dropout=True, num_samples=num_samples, link="identity").samples
    assert samples is not None
    return samples


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_same_values_as_torchs_layer(kind: type[nn.Module], p: float) -> None:
    shape = (4, 6, 5, 5, 5)[: 4 if kind is nn.Dropout2d else 3 if kind is nn.Dropout1d else 5]
    x = torch.randn(shape)
    ours, theirs = masked(kind(p), x, 200), torch.stack([kind(p).train()(x) for _ in range(200)])
    # Each unit is either dropped or kept, so that both have the same set of values at every place.
    for pick in (torch.amin, torch.amax):
        torch.testing.assert_close(pick(ours, 0), pick(theirs, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    dropped = (masked(nn.Dropout(p), torch.ones(1, 500), 100) == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 50_000))


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout])
def test_whole_channels(kind: type[nn.Module]) -> None:
    shape = {nn.Dropout1d: (2, 40, 3), nn.Dropout2d: (2, 40, 3, 3)}.get(kind, (2, 40, 3, 3, 3))
    samples = masked(kind(0.5), torch.ones(shape), 10).flatten(3)
    assert torch.equal(samples, samples[..., :1].expand_as(samples))
    assert 100 < (samples[:, 0, :, 0] == samples.max()).sum() < 300


def test_one_mask_a_draw_and_another_for_each_layer_and_call() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.one(x), self.one(x), self.two(x)], 1)

    pred = stochbn.predict(Thrice(), None, torch.ones(3, 64), dropout=True, num_samples=5, link="identity")
    samples = pred.samples
    assert samples is not None
    assert torch.equal(samples[:, 0], samples[:, 1])  # the same network for every input
    masks = samples[:, 0].reshape(5 * 3, 64)
    assert len({tuple(mask.tolist()) for mask in masks}) == 15


def test_members_of_an_ensemble_have_masks_of_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    pred = stochbn.predict([model, model], None, torch.ones(1, 64), dropout=True, num_samples=1, link="identity")
    assert pred.samples is not None
    assert not torch.equal(pred.samples[0], pred.samples[1])
