"""Tuning: against a search by brute force, on data whose best spread and temperature are known."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn
from stochbn.distributions.base import Tuning
from stochbn.inference.tune import SPREADS, _best, find_minimum

Labelled = list[tuple[Tensor, Tensor]]


def drawn_labels(model: nn.Module, stats: stochbn.Distribution, inputs: list[Tensor], spread: float) -> Labelled:
    """Labels that the drawn networks of a given spread would have made: the best spread is that one."""
    generator = torch.Generator().manual_seed(5)
    labelled = []
    for x in inputs:
        pred = stochbn.predict(model, replace(stats, tuning=Tuning(spread)), x, num_samples=100, seed=99)
        labelled.append((x, torch.multinomial(pred.probs, 1, generator=generator)[:, 0]))
    return labelled


@pytest.fixture
def sharp(batches: list[Tensor]) -> nn.Module:
    """A network whose outputs depend on the draw: large weights behind its last BatchNorm layer."""
    model = small_cnn()
    with torch.no_grad():
        model[-1].weight *= 12
    return calibrate(model, batches)


@pytest.fixture
def held_out() -> list[Tensor]:
    return [torch.rand(250, 1, 8, 8) for _ in range(5)]


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_finds_the_spread_that_made_the_labels(
    spread: float, sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]
) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out, spread)
    tuned = stochbn.tune(sharp, stats, data, num_samples=16, progress=False)
    assert 0.6 * spread < tuned.tuning.spread < 1.5 * spread  # 1,250 labels tell no more
    assert tuned.tuning.temperature == 1.0


def test_the_curve_is_the_nll_of_predict(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out[:3], 1.0)
    labels = torch.cat([y for _, y in data])
    tuned = stochbn.tune(sharp, stats, data, num_samples=8, seed=7, progress=False)
    assert [k for k, _, _ in tuned.tuning.curve][:7] == list(SPREADS)
    for spread, temperature, loss in tuned.tuning.curve:
        tried = replace(stats, tuning=Tuning(spread, temperature))
        pred = stochbn.predict(sharp, tried, data, num_samples=8, seed=7)
        assert stochbn.nll(pred.probs, labels).item() == pytest.approx(loss, rel=1e-5)


def test_finds_a_temperature(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, replace(stats, tuning=None), held_out, 1.0)
    hotter = nn.Sequential(copy.deepcopy(sharp), Times(2.0))
    hot_stats = stochbn.fit(hotter, batches, progress=False)
    tuned = stochbn.tune(hotter, hot_stats, data, choose="both", num_samples=16, progress=False)
    assert 1.6 < tuned.tuning.temperature < 2.5
    assert 0.7 < tuned.tuning.spread < 1.4
    plain = stochbn.tune(hotter, hot_stats, data, num_samples=16, progress=False)
    assert min(loss for *_, loss in tuned.tuning.curve) < min(loss for *_, loss in plain.tuning.curve)


def test_a_temperature_alone(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    """At the fitted spread, by brute force."""
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out[:3], 2.0)
    labels = torch.cat([y for _, y in data])
    tuned = stochbn.tune(sharp, stats, data, choose="temperature", progress=False)
    assert tuned.tuning.spread == 1.0
    [(spread, temperature, lowest)] = tuned.tuning.curve
    assert (spread, temperature) == (1.0, tuned.tuning.temperature)

    def loss(temperature: float) -> float:
        tried = replace(stats, tuning=Tuning(1.0, temperature))
        return stochbn.nll(stochbn.predict(sharp, tried, data, num_samples=8).probs, labels).item()

    wide = replace(stats, tuning=Tuning(3.0))  # the fitted spread is meant, not one that was tuned before
    assert stochbn.tune(sharp, wide, data, choose="temperature", progress=False).tuning == tuned.tuning
    found = loss(tuned.tuning.temperature)
    assert found == pytest.approx(lowest, rel=1e-3)  # of a parabola
    assert found <= min(loss(tuned.tuning.temperature * factor) for factor in (0.8, 0.9, 1.1, 1.25))


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_the_temperature_divides_every_draws_outputs(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    cold = replace(stats, tuning=Tuning(1.0, 0.5))
    outputs = stochbn.predict(model, stats, x, link="identity").samples
    torch.testing.assert_close(stochbn.predict(model, cold, x).samples, (2 * outputs).softmax(2))
    torch.testing.assert_close(stochbn.predict(model, cold, x, link="sigmoid").samples, (2 * outputs).sigmoid())
    torch.testing.assert_close(stochbn.predict(model, cold, x, link="identity").samples, outputs)
    adaptive = stochbn.predict(model, cold, x, num_samples="auto", tolerance=1.0)
    many = stochbn.predict(model, stats, x, num_samples=1024, link="identity").samples
    expected = torch.stack([(2 * many[:n, i]).softmax(1).mean(0) for i, n in enumerate(adaptive.counts.tolist())])
    torch.testing.assert_close(adaptive.probs, expected)


def test_groups_get_spreads_of_their_own(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    names = list(stats.layers)
    true = replace(stats, tuning=Tuning({names[0]: 4.0, names[1]: 4.0, names[2]: 0.5}))
    data = drawn_labels(sharp, stats, [], 1.0)
    generator = torch.Generator().manual_seed(5)
    for x in held_out:
        pred = stochbn.predict(sharp, true, x, num_samples=400, seed=99)
        data.append((x, torch.multinomial(pred.probs, 1, generator=generator)[:, 0]))
    common = stochbn.tune(sharp, stats, data, num_samples=32, progress=False)
    each = stochbn.tune(sharp, stats, iter(data), num_groups=3, num_samples=32, progress=False)
    assert list(each.tuning.spread) == names
    assert each.tuning.spread[names[2]] < 0.8 * min(each.tuning.spread[name] for name in names[:2])
    labels = torch.cat([y for _, y in data])
    losses = [
        stochbn.nll(stochbn.predict(sharp, tuned, data, num_samples=100).probs, labels) for tuned in (common, each)
    ]
    assert losses[1] <= losses[0] + 1e-3
    halves = stochbn.tune(sharp, stats, data[:2], num_groups=2, progress=False)
    assert len(set(halves.tuning.spread.values())) == 2


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_an_ensemble_is_tuned_together(batches: list[Tensor], held_out: list[Tensor]) -> None:
    models = [calibrate(small_cnn(), batches) for _ in range(2)]
    stats = [stochbn.fit(model, batches, progress=False) for model in models]
    data = [(x, torch.randint(3, (len(x),))) for x in held_out[:2]]
    tuned = stochbn.tune(models, stats, data, choose="both", num_samples=4, progress=False)
    assert len(tuned) == 2
    assert tuned[0].tuning == tuned[1].tuning
    spread, temperature, loss = tuned[0].tuning.curve[3]
    tried = [replace(one, tuning=Tuning(spread, temperature)) for one in stats]
    pred = stochbn.predict(models, tried, data, num_samples=4)
    # A parabola's estimate between two temperatures a quarter of an octave apart.
    assert stochbn.nll(pred.probs, torch.cat([y for _, y in data])).item() == pytest.approx(loss, rel=1e-3)


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_dropout_masks_are_the_same_for_all_spreads(dropout_model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    data = [(torch.rand(20, 1, 8, 8), torch.randint(3, (20,)))]
    tuned = stochbn.tune(dropout_model, stats, data, dropout=True, num_samples=8, progress=False)
    for spread, _, loss in tuned.tuning.curve[::4]:
        pred = stochbn.predict(dropout_model, replace(stats, tuning=Tuning(spread)), data, num_samples=8, dropout=True)
        assert stochbn.nll(pred.probs, data[0][1]).item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_models_are_left_as_they_were(model: nn.Module, stats: stochbn.Distribution) -> None:
    model.train()
    data = [(torch.rand(20, 1, 8, 8), torch.randint(3, (20,)))]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tuned = stochbn.tune(model, stats, data, progress=False)
    assert stats.tuning is None
    assert tuned.tuning is not None
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = stochbn.tune(model, tuned, data, progress=False)  # from the fitted spread, not from the tuned one
    assert again.tuning == tuned.tuning


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_segmentations_and_other_batches(batches: list[Tensor]) -> None:
    net = calibrate(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)), batches)
    stats = stochbn.fit(net, batches, progress=False)
    data = [{"image": torch.rand(5, 1, 8, 8), "mask": torch.randint(3, (5, 6, 6))}]
    tuned = stochbn.tune(
        net,
        stats,
        data,
        call=lambda model, batch: model(batch["image"]),
        target=lambda batch: batch["mask"],
        progress=False,
    )
    spread, _, loss = tuned.tuning.curve[0]
    pred = stochbn.predict(net, replace(stats, tuning=Tuning(spread)), data[0]["image"], num_samples=16)
    assert stochbn.nll(pred.probs, data[0]["mask"]).item() == pytest.approx(loss, rel=1e-5)


def test_an_end_of_the_curve_is_told(model: nn.Module, stats: stochbn.Distribution) -> None:
    data = [(torch.rand(40, 1, 8, 8), torch.zeros(40, dtype=torch.long))]
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].weight[0] = 1.0
        model[-1].bias[0] += 5
    with pytest.warns(UserWarning, match="the (largest|smallest) spread tried"):
        stochbn.tune(model, stats, data, progress=False)


def test_temperatures_between_spreads() -> None:
    points = [(2.0**k, 2.0 ** (3 - k), (k - 1.5) ** 2) for k in range(4)]
    points[2] = (4.0, 2.0, 0.2499)  # the lowest; its parabola's minimum is at 2^1.5
    spread, temperature = _best(points)
    assert math.log2(spread) == pytest.approx(1.5, abs=1e-3)
    assert math.log2(temperature) == pytest.approx(3 - math.log2(spread), abs=1e-9)
    assert _best([(1.0, 5.0, 0.1), (2.0, 6.0, 0.2)]) == (1.0, 5.0)
    assert _best([(1.0, 5.0, 0.3), (2.0, 6.0, 0.2)]) == (2.0, 6.0)


def test_what_is_not_finite(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    labels = torch.zeros(7, dtype=torch.long)
    x[3] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf at the smallest spread"):
        stochbn.tune(model, stats, [(x, labels)], progress=False)


def test_a_seed_of_none_is_one_seed(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out[:1], 1.0)
    torch.manual_seed(3)
    one = stochbn.tune(sharp, stats, data, seed=None, progress=False)
    torch.manual_seed(3)
    assert stochbn.tune(sharp, stats, data, seed=None, progress=False).tuning == one.tuning
    losses = [loss for *_, loss in one.tuning.curve]
    assert abs(losses[2] - losses[1]) < 0.2  # neighbours on the same draws


def test_another_rule_of_dropout_is_told(dropout_model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    with pytest.warns(UserWarning, match="fitted with dropout=True and are used with dropout=False"):
        stochbn.tune(dropout_model, stats, [(x, torch.arange(7) % 3)], progress=False)


def test_parabola() -> None:
    assert find_minimum([(1.0, 3.0), (2.0, 2.0), (4.0, 1.0)]) == (4.0, 1.0)
    assert find_minimum([(1.0, 0.5), (2.0, 2.0)]) == (1.0, 0.5)
    assert find_minimum([(1.0, 1.0), (2.0, 1.0), (4.0, 1.0)]) == (1.0, 1.0)


def test_mistakes(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    data = [(x, torch.zeros(7, dtype=torch.long))]
    with pytest.raises(TypeError, match=r"what stochbn\.fit returned, got list"):
        stochbn.tune(model, [data], stats)
    with pytest.raises(TypeError, match=r"what stochbn\.fit returned, got DataLoader"):
        stochbn.tune(model, torch.utils.data.DataLoader([1]), stats)
    with pytest.raises(ValueError, match="a distribution for each, got 2 and 1"):
        stochbn.tune([model, model], [stats], data)
    with pytest.raises(ValueError, match="a distribution for each, got 0 and 0"):
        stochbn.tune([], [], data)
    with pytest.raises(ValueError, match=r"K ≥ 2 classes.*cannot be tuned"):
        stochbn.tune(model, stats, data, call=lambda model, batch: model(batch[0])[:, :1], progress=False)
    with pytest.raises(TypeError, match=r"Expected batches \(x, y\) with labels, got Tensor"):
        stochbn.tune(model, stats, [x], progress=False)
    with pytest.raises(TypeError, match="labels as a tensor, got str"):
        stochbn.tune(model, stats, [(x, "cat")], progress=False)
    with pytest.raises(ValueError, match="empty loader"):
        stochbn.tune(model, stats, [], progress=False)
    with pytest.raises(ValueError, match="as many groups as layers"):
        stochbn.tune(model, stats, data, num_groups=4)
    with pytest.raises(ValueError, match="class indices"):
        stochbn.tune(model, stats, [(x, torch.full((7,), 3))], progress=False)
    with pytest.raises(ValueError, match="choose to be 'spread', 'temperature' or 'both', got 'width'"):
        stochbn.tune(model, stats, data, choose="width")
    with pytest.raises(ValueError, match="no groups of layers for a temperature alone, got num_groups=2"):
        stochbn.tune(model, stats, data, choose="temperature", num_groups=2)
    with pytest.raises(TypeError, match="DataLoader or another iterable"):
        stochbn.tune(model, stats, x)
