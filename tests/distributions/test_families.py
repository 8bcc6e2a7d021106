"""Joint families against NumPy: the correlations that they keep, what they store, and their files."""

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import stochbn
from conftest import calibrate, naive, small_cnn
from stochbn.distributions.base import Layer, Tuning
from stochbn.distributions.families import Sketch, Thinned
from stochbn.statistics.moments import Moments
from stochbn.statistics.normalization import BatchNormalization, evaluating, find_layers

JOINT = ["lowrank", "empirical"]


def observed(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """The oracle: each mini-batch's statistics in a pass of its own, (B, 2, ΣC)."""
    rows = []
    for batch in batches:
        with torch.no_grad(), evaluating(model), BatchNormalization(find_layers(model)) as normalization:
            model(batch)
            rows.append(torch.cat([seen[0] for seen in normalization.take().values()], dim=1))
    return torch.stack(rows)


def flat(draws: stochbn.Draws, stats: stochbn.Fitted) -> np.ndarray:
    """Draws as (S, 2, ΣC): means and log(σ² + ε)."""
    means = torch.cat([values for name, values in draws.buffers.items() if name.endswith("mean")], dim=1)
    logs = [
        (values + layer.eps).log()
        for (name, values), layer in zip(
            [item for item in draws.buffers.items() if item[0].endswith("var")], stats.layers.values(), strict=True
        )
    ]
    return torch.stack([means, torch.cat(logs, dim=1)], dim=1).numpy()


# ---- empirical


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
    rows = kept.distribution(known(1)).observations[:, 0, 0]
    assert len(rows) == 10
    steps = rows.diff()
    assert steps.min() > 0
    assert steps.max() <= 2 * start / 10
    assert rows[0] < start / 10
    assert rows[-1] > start * 0.8


def known(channels: int) -> stochbn.Factorized:
    moments = Moments.of(torch.randn(20, 2, channels, dtype=torch.float64))
    return stochbn.Factorized({"bn": Layer(1e-5, moments)}, batch_size=16, num_batches=20)


# ---- low rank


def test_the_sketch_finds_the_principal_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(3, 40, generator=generator, dtype=torch.float64) * torch.tensor([[3.0], [2.0], [1.0]])
    factors = torch.randn(900, 3, generator=generator, dtype=torch.float64)
    rows = factors @ loadings + 0.3 * torch.randn(900, 40, generator=generator, dtype=torch.float64)
    rows = rows.view(900, 2, 20) + 5
    sketch = Sketch(3)
    for part in rows.split(37):
        sketch.add(part)
    found = sketch.distribution(known(20)).factors.double().flatten(1)
    # A normalised activation moves by one when μ moves by σ, or log σ² by 2. σ is that of the first rows seen.
    sigma = np.exp(rows[:37, 1].numpy().mean(0) / 2)
    scale = np.concatenate([sigma, np.full(20, 2.0)])
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
    sketch._scale = torch.ones(2, 100, dtype=torch.float64)
    for part in rows.view(2000, 2, 100).split(40):
        sketch.add(part)
    found = sketch.distribution(known(100)).factors.double().flatten(1)
    best = np.linalg.eigvalsh(np.cov(rows.numpy().T))[-10:].sum()
    assert found.square().sum().item() > 0.97 * best


def test_a_full_rank_sketch_is_the_covariance(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family="lowrank", size=11, progress=False)  # 12 mini-batches have rank 11
    rows = observed(model, batches).double().flatten(1).numpy()
    factors = stats.factors.double().flatten(1).numpy()
    np.testing.assert_allclose(factors.T @ factors, np.cov(rows.T), rtol=1e-4, atol=1e-6)


def test_low_rank_draws_have_the_marginals_and_the_correlations() -> None:
    torch.manual_seed(1)
    common = torch.randn(400, 1, 1)
    batches = [torch.randn(16, 3) + c for c in common.view(-1, 1)]  # all channels move together
    model = calibrate(nn.Sequential(nn.BatchNorm1d(3)), batches)
    stats = stochbn.fit(model, batches, family="lowrank", size=2, progress=False)
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
    stats = stochbn.fit(model, batches, family="lowrank", size=4, progress=False)
    assert (stats.factors.double().square().sum(0) <= stats.std.square() * (1 + 1e-4) + 1e-12).all()


# ---- all families


@pytest.mark.parametrize("family", JOINT)
def test_predict_equals_the_naive_loop(family: str, model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    pred = stochbn.predict(model, stats, x, num_samples=9, seed=4)
    torch.testing.assert_close(pred.samples, naive(model, stats.sample(9, seed=4), x))


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_spread_scales_the_deviations(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    tuned = replace(stats, tuning=Tuning(2.0))
    each = replace(stats, tuning=Tuning({name: 1.0 + i for i, name in enumerate(stats.layers)}))
    one, double = (flat(s.sample(5, seed=0, spread=0.1), s) for s in (stats, tuned))
    centre = stats.centre.numpy()
    np.testing.assert_allclose(double - centre, 2 * (one - centre), atol=1e-9)
    np.testing.assert_allclose(flat(tuned.sample(3, spread=0, seed=0), tuned), np.stack([centre] * 3))
    by_layer = np.repeat([1.0, 2.0, 3.0], stats.sizes)
    np.testing.assert_allclose(
        flat(each.sample(5, seed=0, spread=0.1), each) - centre, by_layer * (one - centre), atol=1e-9
    )


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_files_give_back_everything(family: str, model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    stats = stochbn.fit(model, batches, family=family, conditioned=True, progress=False)
    names = dict.fromkeys(stats.layers, 1.5)
    for tuning in (None, Tuning(1.25, 0.8, ((1.0, 0.9, 0.25), (2.0, 1.1, 0.5))), Tuning(names, 1.0)):
        tuned = replace(stats, tuning=tuning)
        tuned.save(tmp_path / "s.safetensors")
        back = stochbn.load(tmp_path / "s.safetensors")
        assert type(back) is type(stats)
        assert back.tuning == tuning
        assert (back.conditioned, back.dropout, back.batch_size) == (True, False, 16)
        ours, theirs = tuned.sample(6, seed=2), back.sample(6, seed=2)
        assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in ours.buffers)
        assert all(torch.equal(ours.shares[name], theirs.shares[name]) for name in stats.layers)
        assert theirs.temperature == (tuning.temperature if tuning else 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "psychic"}, "unknown family"),
        ({"conditioned": 1}, "impossible conditioned"),
        ({"tuning": {"spread": "wide", "temperature": 1.0, "curve": []}}, "impossible tuning"),
        ({"tuning": {"spread": -1.0, "temperature": 1.0, "curve": []}}, "finite spreads of at least 0"),
        ({"tuning": {"spread": {"9": 1.0}, "temperature": 1.0, "curve": []}}, "a spread for each of the layers"),
        ({"tuning": {"spread": 1.0, "temperature": float("inf"), "curve": []}}, "a temperature above 0"),
        ({"tuning": {"spread": 1.0}}, "no 'temperature'"),
    ],
)
def test_damaged_files_are_refused(
    change: dict[str, object], message: str, model: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    stats = stochbn.fit(model, batches, family="empirical", progress=False)
    path = tmp_path / "s.safetensors"
    stats.save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["stochbn"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, {"stochbn": json.dumps(header | change)})
    with pytest.raises(ValueError, match=message):
        stochbn.load(path)
    tensors["observations"][0, 0, 0] = math.nan
    save_file(tensors, path, {"stochbn": json.dumps(header)})
    with pytest.raises(ValueError, match="NaN or Inf in observations"):
        stochbn.load(path)


class Twice(nn.Module):
    """Uses one BatchNorm layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).relu())


def test_a_layer_that_is_used_twice_has_no_joint_statistics() -> None:
    batches = [torch.randn(16, 4) for _ in range(5)]
    model = calibrate(Twice(), batches)
    stochbn.fit(model, batches, progress=False)
    with pytest.raises(ValueError, match=r"once in each forward pass.*'norm'.*family='factorized'"):
        stochbn.fit(model, batches, family="empirical", progress=False)


def test_a_layer_that_is_not_used_is_left_out(batches: list[Tensor]) -> None:
    model = calibrate(small_cnn(), batches)
    model.unused = nn.BatchNorm1d(2)
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    with pytest.warns(UserWarning, match="'unused' were used in fewer"):
        stats = stochbn.fit(model, batches, family="lowrank", progress=False)
    assert stats.factors.shape[2] == sum(stats.sizes) == 20


class Later(nn.Module):
    """Uses a second BatchNorm layer from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.BatchNorm1d(4), nn.BatchNorm1d(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x)) if self.calls > 15 else self.first(x)


def test_a_layer_that_is_used_later_has_no_joint_statistics() -> None:
    batches = [torch.randn(16, 4) for _ in range(30)]
    model = calibrate(Later(), batches)
    model.calls = 0
    with pytest.raises(ValueError, match=r"once in each forward pass.*'second'"):
        stochbn.fit(model, batches, family="lowrank", progress=False)


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_copies_and_pickles(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    for other in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        ours, theirs = stats.sample(3, seed=1), other.sample(3, seed=1)
        assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in ours.buffers)


@pytest.mark.parametrize("family", JOINT)
def test_draws_in_parts(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    whole = stats.sample(30, seed=1).buffers["4.running_var"]
    parts = [stats.sample(count, seed=1, first=first).buffers["4.running_var"] for first, count in ((0, 7), (7, 23))]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=0)


def test_a_tuning_that_cannot_be(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, progress=False)
    for spread, temperature in ((-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), ({"1": math.inf}, 1.0)):
        with pytest.raises(ValueError, match="finite spreads of at least 0"):
            Tuning(spread, temperature)
    with pytest.raises(ValueError, match="a spread for each of the layers '1'"):
        replace(stats, tuning=Tuning({"typo": 2.0}))


def test_merging_asks_for_the_same_and_for_tuning_anew(model: nn.Module, batches: list[Tensor]) -> None:
    one, two = (stochbn.fit(model, part, progress=False) for part in (batches[:6], batches[6:]))
    assert replace(one, tuning=Tuning(2.0)).merge(two).tuning is None
    with pytest.raises(ValueError, match="two fits of one model"):
        replace(one, conditioned=True).merge(two)


def test_options_that_are_not_a_familys() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="one of 'factorized', 'lowrank', 'empirical'"):
        stochbn.fit(model, [], family="psychic")
    with pytest.raises(ValueError, match="size= with the families"):
        stochbn.fit(model, [], size=5)
    with pytest.raises(ValueError, match="size of at least 1"):
        stochbn.fit(model, [], family="lowrank", size=0)
