"""The figures that people expect of predictions, drawn on axes of yours. Needs `pip install 'stochbn[plots]'`.

    figure, ax = plt.subplots()
    plots.reliability(ax, pred, labels, label="SBN")

Each function draws on the axes that it is given, labels them, and returns them. It changes nothing else: no figure is
made, no style is set. Call one again on the same axes to compare; what it passes on to Matplotlib, such as `color`,
tells the curves apart.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stochbn.curves import bin_confidence, cover, density, risks, uncertainties
from stochbn.decisions import AbstainRule, By
from stochbn.distributions.empirical import Empirical
from stochbn.distributions.tuning import Tuning
from stochbn.inference.prediction import Prediction

try:
    from matplotlib.axes import Axes
    from matplotlib.ticker import NullLocator
except ModuleNotFoundError as error:  # pragma: no cover - a test runs this in a process of its own
    raise ModuleNotFoundError(
        "Expected Matplotlib for stochbn.plots, got none. Install with pip install 'stochbn[plots]'."
    ) from error

__all__ = ["entropies", "layer_statistics", "reliability", "risk_coverage", "tuning"]

NUM_POINTS = 400  # of a curve at most: files of figures stay small, and nobody sees more
GUIDE: Any = {"color": "0.5", "linewidth": 0.8, "linestyle": ":", "zorder": 1}


def reliability(
    ax: Axes, pred: Prediction | Tensor, labels: Tensor, *, num_bins: int = 15, label: str | None = None, **look: Any
) -> Axes:
    """Draws accuracy against confidence in equal bins, with 95 % intervals; on the diagonal they agree.

    Below the diagonal a network is overconfident. Of a regression it is the share of labels in central intervals,
    against the probability that these are said to have.

    Args:
        ax: Axes to draw on.
        pred: Of any link, that of a regression tuned; or probabilities (N, K, *).
        labels: Classes (N, *), labels (N, K), or values of a regression.
        num_bins: Of confidence, as in `stochbn.ece`.
        label: For the legend.
        look: For `Axes.errorbar`.

    Returns:
        The axes. Intervals are Wilson's, over inputs: pixels or labels of one input are not taken for independent.

    Examples:
        >>> import stochbn.plots
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = stochbn.plots.reliability(ax, torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        >>> ax.get_xlabel()
        'Confidence'
    """
    is_regression = isinstance(pred, Prediction) and pred.link == "identity"
    if is_regression:
        assert isinstance(pred, Prediction)
        shares = cover(pred, labels, num_bins)
    else:
        shares = bin_confidence(pred, labels, num_bins)
    found = shares.count > 0
    each = (shares.predicted, shares.observed, shares.low, shares.high)
    x, y, low, high = (values[found].numpy() for values in each)
    _guide(ax, "diagonal", lambda: ax.plot([0, 1], [0, 1], **GUIDE))
    ax.errorbar(x, y, (y - low, high - y), label=label, **{"marker": "o", "elinewidth": 0.8, **look})
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02))
    ax.set_xlabel("Probability of the interval" if is_regression else "Confidence")
    ax.set_ylabel("Share of labels inside" if is_regression else "Accuracy")
    return ax


def risk_coverage(
    ax: Axes,
    pred: Prediction | Tensor,
    labels: Tensor,
    *,
    by: By = "entropy",
    rule: AbstainRule | None = None,
    label: str | None = None,
    **look: Any,
) -> Axes:
    """Draws the error among the most certain inputs against the share of inputs that these are, in percent.

    The area under it is `stochbn.aurc`. Of a regression the risk is the root of the mean squared error, by `std`. Where
    an input has several places, such as pixels, all places are ranked together.

    Args:
        ax: Axes to draw on.
        pred: Of any link, or probabilities (N, K, *).
        labels: Classes (N, *), labels (N, K), or values of a regression.
        by: The uncertainty to rank by, as in `stochbn.abstain`.
        rule: What `stochbn.abstain` returned: the inputs that it accepts are marked, and the risk that it promises.
        label: For the legend.
        look: For `Axes.plot`.

    Returns:
        The axes.

    Examples:
        >>> import stochbn.plots
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = stochbn.plots.risk_coverage(ax, torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> ax.lines[0].get_ydata().tolist()
        [0.0, 50.0]
    """
    is_regression = isinstance(pred, Prediction) and pred.link == "identity"
    coverage, risk = (values.numpy() for values in risks(pred, labels, by))
    thin = _thin(len(coverage)).numpy()
    (line,) = ax.plot(100 * coverage[thin], risk[thin] * (1 if is_regression else 100), label=label, **look)
    if rule is not None:
        if not isinstance(pred, Prediction):
            raise TypeError("Expected a Prediction for the rule to judge, got a tensor. Pass what predict returned.")
        num_accepted = int(rule(pred).sum())
        _guide(ax, "risk", lambda: [ax.axhline(100 * rule.risk, **GUIDE)])
        if num_accepted:
            at = num_accepted - 1
            ax.plot(100 * coverage[at], 100 * risk[at], "o", color=line.get_color(), label="_accepted", zorder=3)
            ax.axvline(100 * coverage[at], **{**GUIDE, "color": line.get_color()})
    ax.set(xlim=(0, 100), xlabel="Answered, the most certain first, %")
    ax.set_ylabel("RMSE of what is answered" if is_regression else "Error of what is answered, %")
    ax.set_ylim(bottom=0)
    return ax


def entropies(
    ax: Axes,
    known: Prediction | Tensor,
    other: Prediction | Tensor | None = None,
    *,
    complementary: bool = False,
    label: str | None = None,
    **look: Any,
) -> Axes:
    """Draws the ECDF of the entropy on known inputs and, dashed, on out-of-domain ones: the share at or below.

    The further apart the two, the better the entropy detects out-of-domain inputs. Of a regression it is that of `std`.

    Args:
        ax: Axes to draw on.
        known: A prediction, or uncertainties (N,). Where an input has several places, their mean counts.
        other: The same of out-of-domain inputs.
        complementary: Draw the share above instead, on a logarithmic axis, where nearly all inputs are certain.
        label: For the legend, in place of "Known".
        look: For `Axes.plot`.

    Returns:
        The axes.

    Examples:
        >>> import stochbn.plots
        >>> from matplotlib.figure import Figure
        >>> ax = stochbn.plots.entropies(Figure().subplots(), torch.tensor([0.1, 0.3]), torch.tensor([0.5, 0.6]))
        >>> [text.get_text() for text in ax.legend().get_texts()]
        ['Known', 'Out-of-domain']
    """
    is_regression = isinstance(known, Prediction) and known.link == "identity"
    first: dict[str, Any] = {}
    for pred, name, dashes in ((known, label or "Known", {}), (other, "Out-of-domain", {"linestyle": "--"})):
        if pred is None:
            continue
        values = uncertainties(pred).sort().values
        x = torch.cat([values.new_zeros(1), values[_thin(len(values), at_end=complementary)]])
        y = torch.searchsorted(values, x, side="right").double() / len(values)  # of equal values, all are at or below
        if complementary:
            x, y = x[y < 1], 1 - y[y < 1]  # a logarithmic axis has no 0
        (line,) = ax.plot(x.numpy(), y.numpy(), drawstyle="steps-post", label=name, **{**first, **dashes, **look})
        first = {"color": line.get_color()}
    ax.set_xlim(left=0)
    ax.set_xlabel("Standard deviation" if is_regression else "Entropy, nats")
    ax.set_ylabel(f"Share of inputs {'above' if complementary else 'at or below'}")
    if complementary:
        ax.set_yscale("log")
        ax.set_ylim(top=1)
    else:
        ax.set_ylim(0, 1.01)
    return ax


def layer_statistics(
    ax: Axes, stats: Empirical, layer: str, *, channel: int = 0, of: Literal["mu", "sigma"] = "mu", **look: Any
) -> Axes:
    """Draws the statistics of a channel in real mini-batches, as a density, against the fitted r(μ) or r(σ).

    Args:
        ax: Axes to draw on.
        stats: What `stochbn.fit(…, family="empirical")` returned: it keeps the statistics of mini-batches.
        layer: Its name, one of `stats.layers`.
        channel: Of that layer.
        of: "mu" for the means of mini-batches, "sigma" for their standard deviations, √(σ² + ε).
        look: For `Axes.plot`, of the real ones.

    Returns:
        The axes. A channel that does not vary is a vertical line.

    Examples:
        >>> import stochbn.plots
        >>> from matplotlib.figure import Figure
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, family="empirical", progress=False)
        >>> stochbn.plots.layer_statistics(Figure().subplots(), stats, "1", of="sigma").get_xlabel()
        'σ'
    """
    if not isinstance(stats, Empirical):
        raise TypeError(
            f"Expected statistics that keep real mini-batches, got {type(stats).__name__}. Pass "
            "stochbn.fit(model, train_loader, family='empirical')."
        )
    if layer not in stats.layers or not 0 <= channel < stats.layers[layer].num_features:
        raise ValueError(
            f"Expected one of the layers {', '.join(map(repr, stats.layers))} and one of its channels, got {layer!r} "
            f"and {channel}. stats.layers has them."
        )
    place = dict(zip(stats.layers, stats.observations.split(stats.sizes, dim=2), strict=True))
    observed = place[layer][:, ["mu", "sigma"].index(of), channel].double().cpu()  # (B,)
    fitted: Any = stats.layers[layer].r_mu if of == "mu" else stats.layers[layer].r_sigma
    if of == "sigma":
        observed = (observed / 2).exp()
    ax.set(xlabel={"mu": "μ", "sigma": "σ"}[of], yticks=[])
    ax.set_ylabel("Density")
    if observed.std() <= 1e-7 * observed.mean().abs():
        ax.axvline(observed.mean().item(), label="Real mini-batches", **look)
        return ax
    low, high = observed.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64)).tolist()
    margin = 0.15 * (high - low)
    points = torch.linspace(low - margin, high + margin, 250, dtype=torch.float64)
    points = points[points > 0] if of == "sigma" else points
    real, drawn = density(observed, points), fitted.log_prob(points.unsqueeze(1)).exp()  # (P,), (P, C)
    (line,) = ax.plot(points.numpy(), real.numpy(), label="Real mini-batches", **{"linewidth": 1, **look})
    ax.fill_between(points.numpy(), real.numpy(), color=line.get_color(), alpha=0.3, linewidth=0)
    ax.plot(points.numpy(), drawn[:, channel].cpu().numpy(), "--", label=f"Fitted r({'μ' if of == 'mu' else 'σ'})")
    ax.set_ylim(bottom=0)
    return ax


def tuning(ax: Axes, tuned: Tuning, *, label: str | None = None, **look: Any) -> Axes:
    """Draws the NLL on held-out data against the spread of the draws, and a ring around what was chosen.

    Each spread is at its best temperature. Bars are one standard error of the paired difference to the fitted spread.
    The dotted line is the plain network at its best temperature. The axis shows the minimum, and leaves out how high
    the NLL of the widest draws is.

    Args:
        ax: Axes to draw on.
        tuned: `stats.tuning`.
        label: For the legend.
        look: For `Axes.errorbar`.

    Returns:
        The axes.

    Examples:
        >>> import stochbn.plots
        >>> from matplotlib.figure import Figure
        >>> scores = (stochbn.Score(None, 1.0, 0.5), stochbn.Score(1.0, 1.0, 0.4), stochbn.Score(2.0, 1.0, 0.3))
        >>> stochbn.plots.tuning(Figure().subplots(), stochbn.Tuning(2.0, scores=scores)).get_ylabel()
        'NLL on held-out data, nats'
    """
    if not tuned.curve:
        raise ValueError(
            "Expected a tuning that tried spreads, got that of a plain network, or none. Pass stats.tuning of "
            "stats = stochbn.tune(model, stats, val_loader)."
        )
    spreads, _, losses = zip(*tuned.curve, strict=True)
    found = {(score.spread, score.nll): score for score in tuned.scores if isinstance(score.spread, float)}
    errors = [found[spread, loss].standard_error or 0.0 for spread, loss in zip(spreads, losses, strict=True)]
    bars = ax.errorbar(spreads, losses, errors, label=label, **{"marker": "o", "elinewidth": 0.8, **look})
    colour = bars.lines[0].get_color()
    choice = (tuned.spread, tuned.temperature, tuned.noise)
    chosen = [score.nll for score in tuned.scores if (score.spread, score.temperature, score.noise) == choice]
    if chosen and isinstance(tuned.spread, float):
        ax.plot(tuned.spread, chosen[0], "o", markersize=11, markerfacecolor="none", color=colour, label="_chosen")
    elif chosen:
        ax.axhline(chosen[0], color=colour, linewidth=0.8, linestyle="--", label="_chosen")
    plain = min((score.nll for score in tuned.scores if score.spread is None), default=None)
    if plain is not None:
        ax.axhline(plain, **GUIDE, label="Without draws")
    shown = [*chosen, *([] if plain is None else [plain]), *sorted(losses)[: (len(losses) + 1) // 2]]
    shown += [loss for spread, loss in zip(spreads, losses, strict=True) if spread == 1.0]
    show_lowest(ax, shown)
    ax.set(xscale="log", xlabel="Spread of the draws", ylabel="NLL on held-out data, nats")
    label_powers(ax, spreads)
    return ax


def label_powers(ax: Axes, values: Sequence[float]) -> None:
    """Labels the powers of two among some values of a logarithmic axis, and nothing else."""
    powers = [value for value in values if math.log2(value).is_integer()]
    ax.set_xticks(powers, [f"{value:g}" for value in powers])
    ax.xaxis.set_minor_locator(NullLocator())


def show_lowest(ax: Axes, values: list[float]) -> None:
    """Has the vertical axis show some values, with a margin; others may lie beyond it."""
    low, high = min(values), max(values)
    margin = 0.15 * (high - low) or 0.05 * abs(high) or 1.0
    ax.set_ylim(low - margin, high + margin)


def _guide(ax: Axes, name: str, draw: Any) -> None:
    """Draws a line that helps reading, once however often the axes are drawn on."""
    if not any(line.get_gid() == name for line in ax.lines):
        for line in draw():
            line.set_gid(name)


def _thin(count: int, at_end: bool = False) -> Tensor:
    """Returns at most `NUM_POINTS` of the places 0 to count − 1, the ends among them; denser at the end if asked."""
    num = min(count, NUM_POINTS)
    if at_end:
        from_end: Tensor = torch.logspace(1, 0, num, base=count, dtype=torch.float64).round().long()
        places: Tensor = (count - from_end).unique()
        return places
    return torch.linspace(0, count - 1, num, dtype=torch.float64).round().long()
