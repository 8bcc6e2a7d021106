"""Tuning: against a search by brute force, on data whose best spread and temperature are known."""

import copy
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn
from stochbn.distributions.tuning import Tuning
from stochbn.inference.held_out import HeldOut
from stochbn.inference.tune import NOISES, SPREADS, TEMPERATURES

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
    tuned = stochbn.tune(sharp, stats, data, choose="spread", num_samples=16, progress=False)
    assert abs(math.log2(tuned.tuning.spread / spread)) <= 0.5 + 1e-9  # a step of the grid
    assert tuned.tuning.temperature == 1.0


def test_the_curve_is_the_nll_of_predict(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out[:3], 1.0)
    labels = torch.cat([y for _, y in data])
    tuned = stochbn.tune(sharp, stats, data, choose="spread", num_samples=8, seed=7, progress=False)
    assert [k for k, _, _ in tuned.tuning.curve][:7] == list(SPREADS)
    assert {t for _, t, _ in tuned.tuning.curve} == {1.0}
    both = stochbn.tune(sharp, stats, data, num_samples=8, seed=7, progress=False)
    assert {score.spread for score in both.tuning.scores} == {None, *SPREADS}
    for score in (*tuned.tuning.scores, *both.tuning.scores):
        tried = Tuning(score.spread, score.temperature)
        source = tried if score.spread is None else replace(stats, tuning=tried)
        pred = stochbn.predict(sharp, source, data, num_samples=8, seed=7)
        assert stochbn.nll(pred.probs, labels).item() == pytest.approx(score.nll, rel=1e-5)


def test_more_draws_where_they_are_cheap(
    sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    measure = HeldOut.measure
    monkeypatch.setattr(HeldOut, "measure", lambda self, *given: seen.append(self.num_samples) or measure(self, *given))
    net = nn.Sequential(sharp, nn.Dropout(0.1)).eval()
    last, every = (stochbn.fit(net, batches, layers=layers, progress=False) for layers in ("last", None))
    dropping = stochbn.fit(net, batches, layers="last", dropout=True, progress=False)
    data = drawn_labels(net, every, held_out[:1], 1.0)
    for stats, options in ((last, {}), (every, {}), (dropping, {"dropout": True}), (last, {"num_samples": 3})):
        stochbn.tune(net, stats, data, choose="temperature", progress=False, **options)
    stochbn.tune([net, net], [last, every], data, choose="temperature", progress=False)
    assert seen == [64, 8, 8, 3, 8]


def test_finds_a_temperature(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, replace(stats, tuning=None), held_out, 1.0)
    hotter = nn.Sequential(copy.deepcopy(sharp), Times(2.0))
    hot_stats = stochbn.fit(hotter, batches, progress=False)
    tuned = stochbn.tune(hotter, hot_stats, data, num_samples=16, progress=False)
    assert 1.6 < tuned.tuning.temperature < 2.5
    assert tuned.tuning.spread == 1.0
    assert "The plain network is overconfident" in str(tuned.tuning)
    colder = stochbn.tune(nn.Sequential(copy.deepcopy(sharp), Times(0.3)), None, data, progress=False)
    assert colder.temperature < 1
    assert "The plain network is underconfident" in str(colder)


def test_a_temperature_alone(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    """At the fitted spread, by brute force."""
    stats = stochbn.fit(sharp, batches, progress=False)
    data = drawn_labels(sharp, stats, held_out[:3], 2.0)
    labels = torch.cat([y for _, y in data])
    tuned = stochbn.tune(sharp, stats, data, choose="temperature", progress=False)
    assert tuned.tuning.spread == 1.0
    [(spread, best, lowest)] = tuned.tuning.curve
    assert spread == 1.0
    assert 1 < tuned.tuning.temperature <= best

    def loss(temperature: float) -> float:
        tried = replace(stats, tuning=Tuning(1.0, temperature))
        return stochbn.nll(stochbn.predict(sharp, tried, data, num_samples=8).probs, labels).item()

    wide = replace(stats, tuning=Tuning(3.0))  # the fitted spread is meant, not one that was tuned before
    assert stochbn.tune(sharp, wide, data, choose="temperature", progress=False).tuning == tuned.tuning
    assert loss(best) == pytest.approx(lowest, rel=1e-5)
    assert loss(best) <= min(loss(best * factor) for factor in (2**-0.25, 2**0.25))
    [score] = [one for one in tuned.tuning.scores if one.temperature == tuned.tuning.temperature and one.spread]
    assert loss(tuned.tuning.temperature) == pytest.approx(score.nll, rel=1e-5)


class First(nn.Module):
    """One of the outputs, with an axis for it or without."""

    def __init__(self, num_axes: int) -> None:
        super().__init__()
        self.num_axes = num_axes

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] if self.num_axes else x[:, 0]


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
    common = stochbn.tune(sharp, stats, data, choose="spread", num_samples=32, progress=False)
    each = stochbn.tune(sharp, stats, iter(data), choose="spread", num_groups=3, num_samples=32, progress=False)
    assert list(each.tuning.spread) == names
    assert each.tuning.spread[names[2]] < 0.8 * max(each.tuning.spread[name] for name in names[:2])
    assert each.tuning.scores[-1].spread == each.tuning.spread
    labels = torch.cat([y for _, y in data])
    losses = [
        stochbn.nll(stochbn.predict(sharp, tuned, data, num_samples=100).probs, labels) for tuned in (common, each)
    ]
    assert losses[1] <= losses[0] + 1e-3
    halves = stochbn.tune(sharp, stats, data[:2], num_groups=2, progress=False)
    assert len(set(halves.tuning.spread.values())) <= 2


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
    assert stochbn.nll(pred.probs, torch.cat([y for _, y in data])).item() == pytest.approx(loss, rel=1e-5)
    alone = stochbn.tune(models, None, data, progress=False)
    logits = [stochbn.predict(models, None, x, link="identity").samples / alone.temperature for x, _ in data]
    probs = stochbn.predict(models, alone, data).probs
    torch.testing.assert_close(probs, torch.cat(logits, 1).softmax(2).mean(0))


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_dropout_masks_are_the_same_for_all_spreads(dropout_model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    data = [(torch.rand(20, 1, 8, 8), torch.randint(3, (20,)))]
    tuned = stochbn.tune(dropout_model, stats, data, dropout=True, num_samples=8, progress=False)
    for spread, temperature, loss in tuned.tuning.curve[::4]:
        tried = replace(stats, tuning=Tuning(spread, temperature))
        pred = stochbn.predict(dropout_model, tried, data, num_samples=8, dropout=True)
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
    data = [{"image": torch.rand(12, 1, 8, 8), "mask": torch.randint(3, (12, 6, 6))}]
    tuned = stochbn.tune(
        net,
        stats,
        data,
        call=lambda model, batch: model(batch["image"]),
        target=lambda batch: batch["mask"],
        progress=False,
    )
    spread, temperature, loss = tuned.tuning.curve[0]
    pred = stochbn.predict(net, replace(stats, tuning=Tuning(spread, temperature)), data[0]["image"], num_samples=8)
    assert stochbn.nll(pred.probs, data[0]["mask"]).item() == pytest.approx(loss, rel=1e-5)


def test_ends_are_told(model: nn.Module, stats: stochbn.Distribution, batches: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.rand(400, 1, 8, 8), torch.randint(3, (400,), generator=generator))]
    sure = nn.Sequential(model, Times(100.0))
    with pytest.warns(UserWarning, match="lowest at temperature 8, the largest tried. Check that the labels"):
        found = stochbn.tune(sure, None, data, progress=False)
    assert found.temperature == TEMPERATURES[-1]
    assert "the largest tried" in str(found)
    right = [(x, model(x).argmax(1)) for x, _ in data]
    right[0][1][:10] = model(right[0][0]).topk(2).indices[:10, 1]  # and ten mistakes, or nothing would be chosen
    with pytest.warns(UserWarning, match="lowest at temperature 0.25, the smallest tried.*training has not seen them"):
        stochbn.tune(model, None, right, progress=False)
    with pytest.warns(UserWarning, match="lowest at 0.125, the smallest spread tried.*untuned"):
        narrow = stochbn.tune(model, stats, right, choose="spread", num_samples=64, progress=False)
    assert narrow.tuning.spread == 2**-3
    assert "Draws are narrower than fitted, for an NLL lower by" in str(narrow.tuning)
    hot = nn.Sequential(model, Times(5.0))
    wrong, wide = [(x, model(x).argmin(1)) for x, _ in data], stochbn.fit(hot, batches, progress=False)
    with pytest.warns(UserWarning, match="lowest at 16, the largest spread tried"):
        stochbn.tune(hot, wide, wrong, choose="spread", num_samples=64, progress=False)


def test_what_is_not_finite(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    labels = torch.zeros(7, dtype=torch.long)
    x[3] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf from the network itself"):
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
    assert stochbn.tune(sharp, stats, data, seed=None, progress=False).tuning != one.tuning


@pytest.mark.filterwarnings("ignore:Held-out data with")
def test_another_rule_of_dropout_is_told(dropout_model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    with pytest.warns(UserWarning, match="fitted with dropout=True and are used with dropout=False"):
        stochbn.tune(dropout_model, stats, [(x, torch.arange(7) % 3)], progress=False)


def test_mistakes(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    data = [(x, torch.zeros(7, dtype=torch.long))]
    with pytest.raises(TypeError, match=r"what stochbn\.fit returned, or None, got list"):
        stochbn.tune(model, [data], stats)
    with pytest.raises(TypeError, match=r"what stochbn\.fit returned, or None, got DataLoader"):
        stochbn.tune(model, torch.utils.data.DataLoader([1]), stats)
    with pytest.raises(ValueError, match="a distribution for each, got 2 and 1"):
        stochbn.tune([model, model], [stats], data)
    with pytest.raises(ValueError, match="a distribution for each, got 0 and 0"):
        stochbn.tune([], [], data)
    with pytest.raises(ValueError, match=r"K ≥ 2 classes for link='softmax'.*Pass link='sigmoid'"):
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
    with pytest.raises(ValueError, match="statistics to choose a spread of, got None with choose='spread'"):
        stochbn.tune(model, None, data, choose="spread")
    with pytest.raises(ValueError, match="got None with choose='both' and num_groups=2"):
        stochbn.tune(model, None, data, num_groups=2)
    with pytest.raises(ValueError, match="link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"):
        stochbn.tune(model, stats, data, link="probit")
    with pytest.raises(ValueError, match="error of the network to measure noise by, got 0"):
        stochbn.tune(model, stats, [(x, model(x).detach())], link="identity", progress=False)


def test_labels_of_one_class_choose_nothing(model: nn.Module, stats: stochbn.Distribution) -> None:
    data = [(torch.rand(40, 1, 8, 8), torch.full((40,), 2))]
    for source in (stats, None):
        with pytest.warns(
            UserWarning, match="Labels of one kind only cannot choose.*pass held-out data with all classes"
        ):
            tuned = stochbn.tune(model, source, data, progress=False)
        tuning = tuned if source is None else tuned.tuning
        assert tuning.temperature == 1.0
        assert tuning.spread == (None if source is None else 1.0)
        assert "Labels of one kind only" in str(tuning)


@pytest.mark.parametrize(("num_mistakes", "words"), [(0, "no mistakes"), (1, "1 mistake"), (9, "9 mistakes")])
@pytest.mark.parametrize("choose", ["spread", "both"])
def test_few_easy_inputs_leave_the_fitted_spread(
    num_mistakes: int, words: str, choose: str, sharp: nn.Module, batches: list[Tensor]
) -> None:
    """200 of the surest inputs: without a mistake the curve alone would take the narrowest draws that it tries."""
    stats = stochbn.fit(sharp, batches, progress=False)
    x = torch.rand(3000, 1, 8, 8)
    probs = stochbn.predict(sharp, stats, x, num_samples=8).probs
    easy = probs.amax(1).argsort(descending=True)[:400:2]
    labels = probs.argmax(1)[easy]
    if num_mistakes:  # among the least sure
        labels[-num_mistakes:] = probs[easy].argsort(descending=True)[-num_mistakes:, 1]
    with pytest.warns(UserWarning, match=f"with {words} cannot choose.*enough for 10 mistakes"):
        tuned = stochbn.tune(sharp, stats, [(x[easy], labels)], choose=choose, progress=False)
    if choose == "spread" and not num_mistakes:
        assert min(tuned.tuning.curve, key=lambda row: row[2])[0] == SPREADS[0]
    assert tuned.tuning.spread == 1.0
    assert stochbn.predict(sharp, tuned, x).epistemic.mean() > 0.01
    assert "stands" in tuned.tuning.verdict[-1]


def test_the_temperature_of_a_plain_network(sharp: nn.Module, held_out: list[Tensor]) -> None:
    """Against scipy's minimiser, to half a step of the grid; what is chosen is within one standard error of that."""
    generator = torch.Generator().manual_seed(3)
    data = [(x, torch.multinomial((sharp(x) / 2).softmax(1).detach(), 1, generator=generator)[:, 0]) for x in held_out]
    logits, labels = torch.cat([sharp(x).detach() for x, _ in data]).double(), torch.cat([y for _, y in data])

    def losses(temperature: float) -> Tensor:
        return nn.functional.cross_entropy(logits / temperature, labels, reduction="none")

    found = stochbn.tune(sharp, None, data, progress=False)
    best = min(found.scores, key=lambda score: score.nll).temperature
    exact = minimize_scalar(lambda t: losses(t).mean().item(), bounds=(0.25, 8), method="bounded").x
    assert abs(math.log2(best / exact)) <= 0.125 + 1e-6
    assert found.spread is None
    assert 1 < found.temperature <= best
    gap = losses(found.temperature) - losses(best)
    assert gap.mean() <= gap.std() / len(gap) ** 0.5
    for score in found.scores:
        gap = losses(score.temperature) - losses(1.0)
        assert score.difference == pytest.approx(gap.mean().item(), abs=1e-6)
        assert score.standard_error == pytest.approx(gap.std().item() / len(gap) ** 0.5, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("shape", [(3,), (1,), ()])
def test_sigmoid_against_binary_cross_entropy(
    shape: tuple[int, ...], sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]
) -> None:
    """Several labels, one output with labels (N,) and one without an axis for it."""
    head = {(3,): nn.Identity(), (1,): First(1), (): First(0)}[shape]
    net = nn.Sequential(sharp, head)
    stats = stochbn.fit(net, batches, progress=False)
    x = torch.cat(held_out[:2])
    labels = torch.bernoulli(stochbn.predict(net, stats, x, link="sigmoid", num_samples=100, seed=9).probs)
    if shape == (1,):
        labels = labels[:, 0].long()
    tuned = stochbn.tune(net, stats, [(x, labels)], link="sigmoid", progress=False)
    for score in tuned.tuning.scores[::3]:
        tried = Tuning(score.spread, score.temperature)
        source = tried if score.spread is None else replace(stats, tuning=tried)
        probs = stochbn.predict(net, source, x, link="sigmoid", num_samples=8).probs.double()
        truth = labels.double().view(probs.shape)
        expected = nn.functional.binary_cross_entropy(probs, truth, reduction="none").view(len(x), -1).sum(1).mean()
        assert score.nll == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_regression_noise_has_a_closed_form(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(sharp, batches, progress=False)
    x = torch.cat(held_out[:2])
    targets = sharp(x).detach() + 0.5 * torch.randn(len(x), 3)
    tuned = stochbn.tune(
        sharp, stats, [(x[:100], targets[:100]), (x[100:], targets[100:])], link="identity", progress=False
    )
    rmse = (sharp(x) - targets).square().mean().sqrt().item()
    plain = tuned.tuning.scores[0]
    assert plain.spread is None
    assert plain.noise == pytest.approx(rmse, rel=1e-5)
    assert plain.nll == pytest.approx(3 * (0.5 * math.log(2 * math.pi * rmse**2) + 0.5), rel=1e-5)
    assert tuned.tuning.temperature == 1.0
    for score in tuned.tuning.scores[1:]:
        pred = stochbn.predict(sharp, replace(stats, tuning=Tuning(score.spread)), x, link="identity", num_samples=8)

        def loss(noise: float, pred: stochbn.Prediction = pred) -> float:
            normal = torch.distributions.Normal(pred.mean.double(), (pred.std.double() ** 2 + noise**2).sqrt())
            return -normal.log_prob(targets.double()).sum(1).mean().item()

        assert score.nll == pytest.approx(loss(score.noise), rel=1e-4)
        assert score.nll <= min(loss(rmse * factor) for factor in NOISES) + 1e-4
    pred = stochbn.predict(sharp, tuned, x, link="identity")
    assert pred.noise == tuned.tuning.noise
    torch.testing.assert_close(pred.total_std.square(), pred.std.square() + pred.noise**2)
    with pytest.raises(AttributeError, match="a noise level for total_std"):
        _ = stochbn.predict(sharp, stats, x, link="identity").total_std
    alone = stochbn.tune(sharp, None, [(x, targets)], link="identity", progress=False)
    assert alone.noise == pytest.approx(rmse, rel=1e-5)
    torch.testing.assert_close(
        stochbn.predict(sharp, alone, x, link="identity").total_std, torch.full((500, 3), alone.noise)
    )


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_plain_with_noise_may_win(model: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, progress=False)
    x = torch.cat(held_out[:2])
    targets = model(x).detach() + 0.01 * torch.randn(len(x), 3)
    tuned = stochbn.tune(model, stats, [(x, targets)], link="identity", progress=False)
    assert "the plain network with noise" in tuned.tuning.verdict[0]
    assert "draws may still help out of domain" in tuned.tuning.verdict[0]


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_shuffled_data_give_the_same(sharp: nn.Module, batches: list[Tensor], held_out: list[Tensor]) -> None:
    """A second pass in another order must not be compared with the first."""
    stats = stochbn.fit(sharp, batches, progress=False)
    x = torch.cat(held_out)
    labels = sharp(x).argmax(1)
    labels[:10] = sharp(x[:10]).topk(2).indices[:, 1]
    right = torch.utils.data.TensorDataset(x, labels)
    ordered, shuffled = (
        stochbn.tune(
            sharp,
            stats,
            torch.utils.data.DataLoader(right, 250, shuffle=shuffle),
            choose="spread",
            progress=False,
        )
        for shuffle in (False, True)
    )
    assert len(ordered.tuning.curve) == 11
    for one, other in zip(ordered.tuning.scores, shuffled.tuning.scores, strict=True):
        assert other.standard_error == pytest.approx(one.standard_error, rel=1e-3, abs=1e-9)


class InDict(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.model(x)}


@pytest.mark.filterwarnings("ignore:Held-out data with")
@pytest.mark.parametrize("form", ["tensor", "loader", "tune"])
def test_advice_for_a_dict_works(form: str, model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    net, data = InDict(model), [(x, torch.arange(7) % 3)]

    def use(**options: Any) -> None:
        if form == "tune":
            stochbn.tune(net, None, data, progress=False, **options)
        else:
            stochbn.predict(net, None, x if form == "tensor" else data, **options)

    with pytest.raises(TypeError, match="got dict") as told:
        use()
    advice = re.findall(r"call=(lambda .*?\['out'\])", str(told.value))
    assert len(advice) == 2
    use(call=eval(advice[0 if form == "tensor" else 1]))


@pytest.mark.parametrize("is_batched", [False, True])
def test_advice_for_probabilities_works(is_batched: bool, model: nn.Module, x: Tensor) -> None:
    net = nn.Sequential(model, nn.Softmax(1))
    inputs = [(x, torch.arange(7) % 3)] if is_batched else x
    with pytest.raises(ValueError, match="probabilities already") as told:
        stochbn.predict(net, None, inputs)
    advice = re.findall(r"call=(lambda .*?\.log\(\))", str(told.value))
    pred = stochbn.predict(net, None, inputs, call=eval(advice[is_batched]))
    torch.testing.assert_close(pred.probs, model(x).softmax(1))


def test_labels_that_do_not_fit_the_link(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    def tune(labels: Tensor, link: str) -> None:
        stochbn.tune(model, stats, [(x, labels)], link=link, progress=False)

    with pytest.raises(ValueError, match=r"class indices as labels for link='softmax', got torch\.float32.*'sigmoid'"):
        tune(torch.rand(7), "softmax")
    with pytest.raises(ValueError, match=r"targets of shape \(7,\)"):
        tune(torch.zeros(7, 3, dtype=torch.long), "softmax")
    with pytest.raises(ValueError, match=r"the outputs' shape \[7, 3\] for link='sigmoid', got \[7\].*link='softmax'"):
        tune(torch.arange(7) % 3, "sigmoid")
    with pytest.raises(ValueError, match=r"labels of 0 and 1 for link='sigmoid', got 0 to 2.*link='softmax'"):
        tune(torch.arange(21).view(7, 3) % 3, "sigmoid")
    with pytest.raises(ValueError, match=r"the outputs' shape \[7, 3\] for link='identity', got \[7, 2\]"):
        tune(torch.rand(7, 2), "identity")
    with pytest.raises(ValueError, match="Expected finite labels, got NaN or Inf"):
        tune(torch.full((7, 3), math.nan), "identity")


def test_a_tuning_in_place_of_statistics(
    model: nn.Module, stats: stochbn.Distribution, x: Tensor, tmp_path: Path
) -> None:
    cold = Tuning(None, 0.5)
    expected = (2 * model(x)).softmax(1).detach()
    torch.testing.assert_close(stochbn.predict(model, cold, x).probs, expected)
    predictor = stochbn.Predictor(model, cold)
    for one in (predictor, predictor.to("cpu"), copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor))):
        torch.testing.assert_close(one(x).probs, expected)
    assert stochbn.export(model, cold, x, tmp_path / "net.onnx") < 1e-5
    mixed = stochbn.predict([model, model], [cold, stats], x, num_samples=4).probs
    drawn = stochbn.predict([model, model], [None, stats], x, num_samples=4).probs
    plain = stochbn.predict(model, None, x).probs
    torch.testing.assert_close(2 * (mixed - drawn), expected - plain)
    with pytest.raises(
        ValueError, match=r"tuning of a plain network, got one with spread 2\.0\. Pass the distribution"
    ):
        stochbn.predict(model, Tuning(2.0), x)
    with pytest.raises(ValueError, match="a tuning with a spread, got that of a plain network"):
        replace(stats, tuning=cold)
