"""What was drawn is what an independent computation gives."""

import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats as scipy_stats
from torch import nn

import stochbn
from oracles import known
from stochbn import plots
from stochbn.inference.prediction import Prediction


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def scored():
    """A prediction of 2,000 inputs that is as right as it says, and their labels."""
    logits = 3 * torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    pred = stochbn.predict(nn.Identity(), None, logits)
    return pred, torch.multinomial(pred.probs, 1, generator=torch.Generator().manual_seed(1))[:, 0]


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Linear(4, 3))
    batches = [torch.randn(16, 3) for _ in range(60)]
    labelled = [(x, (4 * model(x)).softmax(1).multinomial(1)[:, 0]) for x in batches]
    with torch.no_grad():
        model[3].weight *= 8  # so that it is overconfident, and draws help
        model[3].bias *= 8
    stats = stochbn.fit(model, batches, family="empirical", progress=False)
    return stats, stochbn.tune(model, stats, labelled, choose="spread", num_samples=4, progress=False)


def test_reliability_has_each_bin_with_its_interval(ax, scored):
    pred, labels = scored
    assert plots.reliability(ax, pred, labels, label="mine", color="red") is ax
    (bars,) = ax.containers
    x, y = bars.lines[0].get_data()
    confidence, correct = pred.probs.max(1).values.numpy(), (pred.classes == labels).numpy()
    bins = np.ceil(confidence * 15).astype(int) - 1
    there = np.unique(bins)
    np.testing.assert_allclose(x, [confidence[bins == b].mean() for b in there], rtol=1e-5)
    np.testing.assert_allclose(y, [correct[bins == b].mean() for b in there])
    segments = bars.lines[2][0].get_segments()
    for segment, b in zip(segments, there, strict=True):
        interval = scipy_stats.binomtest(int(correct[bins == b].sum()), int((bins == b).sum())).proportion_ci(
            method="wilson"
        )
        np.testing.assert_allclose(segment[:, 1], [interval.low, interval.high], atol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel(), bars.get_label()) == ("Confidence", "Accuracy", "mine")


def test_a_second_curve_shares_the_diagonal(ax, scored):
    pred, labels = scored
    plots.reliability(ax, pred, labels)
    plots.reliability(ax, pred.probs, labels)
    assert [line.get_gid() for line in ax.lines].count("diagonal") == 1
    first, second = (bars.lines[0].get_ydata() for bars in ax.containers)
    np.testing.assert_array_equal(first, second)


def test_reliability_of_a_regression_is_that_of_its_intervals(ax):
    mean = torch.zeros(500, 1)
    pred = Prediction("identity", 2, mean, 0 * mean, None, None, noise=2.0)
    labels = 2 * torch.randn(500, generator=torch.Generator().manual_seed(2))
    plots.reliability(ax, pred, labels, num_bins=10)
    levels, shares = ax.containers[0].lines[0].get_data()
    expected = [np.mean(abs(labels.numpy()) <= 2 * scipy_stats.norm.ppf((1 + level) / 2)) for level in levels]
    np.testing.assert_allclose(shares, expected)
    assert ax.get_xlabel() == "Probability of the interval"


def test_risk_coverage_is_the_naive_curve_and_marks_the_rule(ax, scored):
    pred, labels = scored
    rule = stochbn.abstain(pred, labels, risk=0.1)
    plots.risk_coverage(ax, pred, labels, rule=rule, color="blue")
    curve, promised, mark, at = ax.lines
    wrong = (pred.classes != labels).numpy()[np.argsort(pred.entropy.numpy(), kind="stable")]
    risk = 100 * np.cumsum(wrong) / np.arange(1, 2001)
    coverage = curve.get_xdata()
    np.testing.assert_allclose(curve.get_ydata(), risk[np.round(coverage * 20).astype(int) - 1])
    assert promised.get_ydata()[0] == 10
    accepted = rule(pred)
    assert mark.get_xdata()[0] == pytest.approx(100 * accepted.double().mean().item())
    errors = (pred.classes != labels)[accepted].double().mean().item()
    assert mark.get_ydata()[0] == pytest.approx(100 * errors)
    assert at.get_xdata()[0] == mark.get_xdata()[0]
    assert len(curve.get_xdata()) == plots.NUM_POINTS
    with pytest.raises(TypeError, match="Expected a Prediction for the rule to judge, got a tensor"):
        plots.risk_coverage(ax, pred.probs, labels, rule=rule)


def test_a_rule_that_accepts_nothing_has_no_mark(ax, scored):
    pred, labels = scored
    with pytest.warns(UserWarning, match="would prove a risk"):
        rule = stochbn.abstain(pred[:50], labels[:50], risk=0.001)
    plots.risk_coverage(ax, pred, labels, rule=rule)
    assert len(ax.lines) == 2


def test_entropies_are_matplotlibs_own_ecdf(ax):
    generator = torch.Generator().manual_seed(3)
    values, other = torch.rand(300, generator=generator).double(), 1 + torch.rand(200, generator=generator).double()
    plots.entropies(ax, values, other)
    for line, numbers in zip(ax.lines, (values, other), strict=True):
        x, y = line.get_data()
        expected = np.searchsorted(np.sort(numbers.numpy()), x, side="right") / len(numbers)
        np.testing.assert_allclose(y, expected)
        assert y[-1] == 1
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]
    assert ax.lines[0].get_color() == ax.lines[1].get_color()


def test_the_share_above_reaches_the_last_inputs():
    ax, generator = Figure().subplots(), torch.Generator().manual_seed(3)
    values = torch.rand(5000, generator=generator).double()
    plots.entropies(ax, values, complementary=True, label="mine")
    x, y = ax.lines[0].get_data()
    np.testing.assert_allclose(y, [(values.numpy() > one).mean() for one in x], atol=1e-12)
    assert (y[0], y[-1]) == pytest.approx((1, 1 / 5000))
    assert ax.get_yscale() == "log"
    assert ax.lines[0].get_label() == "mine"


def test_the_entropy_of_a_regression_is_its_standard_deviation(ax):
    std = torch.tensor([[0.5], [1.0]])
    plots.entropies(ax, Prediction("identity", 2, 0 * std, std, None, None))
    assert ax.get_xlabel() == "Standard deviation"
    assert ax.lines[0].get_xdata().tolist() == [0, 0.5, 1.0]


@pytest.mark.parametrize("of", ["mu", "sigma"])
def test_statistics_of_a_layer_against_what_was_fitted(ax, fitted, of):
    stats = fitted[0]
    plots.layer_statistics(ax, stats, "1", channel=2, of=of)
    real, drawn = ax.lines
    values = stats.observations[:, 0 if of == "mu" else 1, 2].double().numpy()
    mean, std = values.mean(), values.std(ddof=1)
    if of == "mu":
        law = scipy_stats.norm(mean, std)
    else:
        values, law = np.exp(values / 2), scipy_stats.lognorm(std / 2, scale=np.exp(mean / 2))
    x = real.get_xdata()
    np.testing.assert_allclose(real.get_ydata(), scipy_stats.gaussian_kde(values)(x), rtol=1e-6)
    np.testing.assert_allclose(drawn.get_ydata(), law.pdf(x), rtol=1e-4)
    assert [line.get_label() for line in ax.lines] == ["Real mini-batches", f"Fitted r({'μ' if of == 'mu' else 'σ'})"]


def test_a_constant_channel_is_a_line(ax, fitted):
    stats = stochbn.Empirical(fitted[0].layers, 16, 5, observations=torch.ones(5, 2, 4))
    plots.layer_statistics(ax, stats, "1")
    assert ax.lines[0].get_xdata() == [1, 1]


def test_statistics_that_are_not_there(ax, fitted):
    with pytest.raises(TypeError, match="keep real mini-batches, got Factorized"):
        plots.layer_statistics(ax, known(), "bn")
    with pytest.raises(ValueError, match="Expected one of the layers '1' and one of its channels, got '7' and 0"):
        plots.layer_statistics(ax, fitted[0], "7")
    with pytest.raises(ValueError, match="got '1' and 4"):
        plots.layer_statistics(ax, fitted[0], "1", channel=4)


def test_tuning_has_the_curve_what_was_chosen_and_the_plain_network(ax, fitted):
    tuning = fitted[1].tuning
    plots.tuning(ax, tuning, label="draws")
    (bars,) = ax.containers
    spreads = sorted({score.spread for score in tuning.scores if score.spread is not None})
    lowest = [min(score.nll for score in tuning.scores if score.spread == spread) for spread in spreads]
    np.testing.assert_allclose(np.asarray(bars.lines[0].get_data(), dtype=float), [spreads, lowest])
    chosen = next(line for line in ax.lines if line.get_label() == "_chosen")
    assert chosen.get_xdata() == [tuning.spread]
    plain = next(line for line in ax.lines if line.get_label() == "Without draws")
    assert plain.get_ydata()[0] == min(score.nll for score in tuning.scores if score.spread is None)
    low, high = ax.get_ylim()
    assert low < min(lowest) < high
    assert high - low < 3 * (np.median(lowest) - min(lowest) + abs(plain.get_ydata()[0] - min(lowest)))
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.5", "1", "2", "4"]


def test_the_axis_of_tuning_shows_the_minimum():
    scores = [stochbn.Score(spread, 1.0, loss) for spread, loss in ((0.5, 0.31), (1.0, 0.3), (2.0, 0.305), (4.0, 50.0))]
    ax = plots.tuning(Figure().subplots(), stochbn.Tuning(1.0, scores=tuple(scores)))
    assert ax.get_ylim()[1] < 0.32


def test_a_spread_by_layer_is_a_line(ax):
    scores = (stochbn.Score(1.0, 1.0, 0.4), stochbn.Score({"a": 2.0}, 1.0, 0.3))
    plots.tuning(ax, stochbn.Tuning({"a": 2.0}, scores=scores))
    assert next(line for line in ax.lines if line.get_label() == "_chosen").get_ydata()[0] == 0.3


def test_a_tuning_without_spreads_is_refused(ax):
    with pytest.raises(ValueError, match="Expected a tuning that tried spreads, got that of a plain network"):
        plots.tuning(ax, stochbn.Tuning(None, 1.5, (stochbn.Score(None, 1.5, 0.3),)))


def test_drawing_changes_no_setting(ax, scored):
    before = dict(mpl.rcParams)
    pred, labels = scored
    kept = pred.probs.clone(), labels.clone()
    plots.reliability(ax, pred, labels)
    plots.risk_coverage(ax, pred, labels)
    plots.entropies(ax, pred)
    assert dict(mpl.rcParams) == before
    assert torch.equal(kept[0], pred.probs)
    assert torch.equal(kept[1], labels)


def test_without_matplotlib_a_sentence_says_what_to_install():
    script = "import sys; sys.modules['matplotlib'] = None; import stochbn, stochbn.plots"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "Expected Matplotlib for stochbn.plots, got none. Install with pip install 'stochbn[plots]'." in ended.stderr
