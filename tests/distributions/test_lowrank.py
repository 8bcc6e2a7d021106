"""The sketch against the covariance, draws against their marginals and correlations."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, flat, known, observed, of_channels
from stochbn.distributions.lowrank import Sketch

UNITS = torch.tensor([[1.0], [2.0]], dtype=torch.float64)  # of μ and log σ² around 0, in which directions compete


def test_the_sketch_finds_the_principal_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(3, 40, generator=generator, dtype=torch.float64) * torch.tensor([[3.0], [2.0], [1.0]])
    factors = torch.randn(900, 3, generator=generator, dtype=torch.float64)
    rows = factors @ loadings + 0.3 * torch.randn(900, 40, generator=generator, dtype=torch.float64)
    rows = rows.view(900, 2, 20) + 5
    sketch = Sketch(3)
    for part in rows.split(37):
        sketch.add(part)
    moments = of_channels(20)
    found = sketch.distribution(moments).factors.double().flatten(1)
    # A normalised activation moves by one when μ moves by σ, or log σ² by 2. σ is that of the moments.
    scale = np.concatenate([np.exp(moments.centre[1].numpy() / 2), np.full(20, 2.0)])
    scaled = rows.flatten(1).numpy() / scale
    values, vectors = np.linalg.eigh(np.cov(scaled.T))
    truth = (vectors[:, -3:] * np.sqrt(values[-3:])) @ (vectors[:, -3:] * np.sqrt(values[-3:])).T
    ours = found.numpy() / scale
    # What is cut off on the way are the smallest of 40 directions, of 32 kept.
    np.testing.assert_allclose(ours.T @ ours, truth, atol=0.02 * np.abs(truth).max())


def test_what_the_sketch_cuts_off_on_the_way_is_small() -> None:
    """Directions of slowly falling strength, and a mean that drifts: keeping only the rank itself would lose much."""
    generator = torch.Generator().manual_seed(0)
    strengths = 0.97 ** torch.arange(200, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=torch.float64)).Q
    rows = torch.randn(2000, 200, generator=generator, dtype=torch.float64) * strengths @ basis.T
    rows += torch.linspace(0, 1, 2000, dtype=torch.float64)[:, None] * basis[:, 0]
    sketch = Sketch(10)
    for part in (rows.view(2000, 2, 100) * UNITS).split(40):
        sketch.add(part)
    found = sketch.distribution(known(mean=0.0, channels=100)).factors.double() / UNITS
    best = np.linalg.eigvalsh(np.cov(rows.numpy().T))[-10:].sum()
    assert found.square().sum().item() > 0.97 * best


def test_a_full_rank_sketch_is_the_covariance(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family="lowrank", rank=11, progress=False)  # 12 mini-batches have rank 11
    rows = observed(model, batches).double().flatten(1).numpy()
    factors = stats.factors.double().flatten(1).numpy()
    np.testing.assert_allclose(factors.T @ factors, np.cov(rows.T), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The loader does not seem to be shuffled")  # mini-batches share factors
def test_low_rank_draws_have_the_marginals_and_the_correlations() -> None:
    torch.manual_seed(1)
    common = torch.randn(400, 1, 1)
    batches = [torch.randn(16, 3) + c for c in common.view(-1, 1)]  # all channels move together
    model = calibrate(nn.Sequential(nn.BatchNorm1d(3)), batches)
    stats = stochbn.fit(model, batches, family="lowrank", rank=2, progress=False)
    factorized = stochbn.fit(model, batches, progress=False)
    count = 20000
    drawn = flat(stats.sample(count, seed=0)[::2], stats)
    # Standard errors of a standard deviation and of a correlation from n independent draws.
    bound = 5 / math.sqrt(count / 2)
    np.testing.assert_allclose(drawn.std(0) / factorized.std.numpy(), 1, atol=bound)
    truth = np.corrcoef(observed(model, batches)[:, 0].numpy().T)
    assert truth[0, 1] > 0.8
    np.testing.assert_allclose(np.corrcoef(drawn[:, 0].T), truth, atol=0.02 + bound)
    independent = flat(factorized.sample(count, seed=0)[::2], factorized)
    assert abs(np.corrcoef(independent[:, 0].T)[0, 1]) < bound


def test_factors_never_exceed_the_marginal_variance(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family="lowrank", rank=4, progress=False)
    assert (stats.factors.double().square().sum(0) <= stats.std.square() * (1 + 1e-4) + 1e-12).all()


def test_merged_sketches_are_one_sketch() -> None:
    rows = torch.randn(50, 2, 20, dtype=torch.float64) + torch.randn(50, 1, 1, dtype=torch.float64)
    whole, one, other = Sketch(10), Sketch(10), Sketch(10)  # 60 rows: they hold all of these
    for sketch, parts in ((whole, rows.split(10)), (one, rows[:20].split(10)), (other, rows[20:].split(7))):
        for part in parts:
            sketch.add(part)
    one.merge(other)
    moments = of_channels(20)
    found, expected = (sketch.distribution(moments).factors for sketch in (one, whole))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_merged_sketches_follow_more_rows_than_they_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    strengths = 0.97 ** torch.arange(200, dtype=torch.float64)
    rows = torch.randn(2000, 200, generator=generator, dtype=torch.float64) * strengths
    sketches = [Sketch(10), Sketch(10)]
    for sketch, half in zip(sketches, rows.view(2000, 2, 100).split(1000), strict=True):
        for part in (half * UNITS).split(40):
            sketch.add(part)
    sketches[0].merge(sketches[1])
    found = sketches[0].distribution(known(mean=0.0, channels=100)).factors.double() / UNITS
    best = np.linalg.eigvalsh(np.cov(rows.numpy().T))[-10:].sum()
    assert found.square().sum().item() > 0.97 * best  # as much as one sketch


def test_merged_fits_have_the_factors_of_both(model: nn.Module, batches: list[Tensor]) -> None:
    options = {"family": "lowrank", "rank": 11, "progress": False}  # all that 12 mini-batches have
    whole, one, other = (stochbn.fit(model, part, **options) for part in (batches, batches[:5], batches[5:]))
    merged = one.merge(other, rank=11)
    torch.testing.assert_close(merged.std, whole.std, rtol=1e-9, atol=1e-12)
    found, expected = (stats.factors.double().flatten(1) for stats in (merged, whole))
    torch.testing.assert_close(found.T @ found, expected.T @ expected, rtol=1e-4, atol=1e-6)
    assert len(one.merge(other).factors) == len(other.factors)
    with pytest.raises(ValueError, match="rank of at least 1, got 0"):
        one.merge(other, rank=0)
