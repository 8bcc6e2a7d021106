"""The numbers of the study → figures. Pure functions."""

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stochbn import plots
from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.methods import BLUE, GREEN, METHODS
from stochbn.experiments.report.figures import line
from stochbn.experiments.study.results import Results
from stochbn.pages.figures import FULL, INK, STYLE, add_legend

# Whose curves are drawn against the strength of corruption: each has a colour of its own.
_CURVES = ("plain", "tuned", "last-tuned", "dropout", "ensemble", "ensemble+last")
_MARKERS = "os^D"  # of families that share a colour
_PANELS = (
    ("nll", "NLL, nats", 1, "← better"),
    ("ece", "ECE, %", 100, "← better"),
    ("auroc_entropy", "AUROC", 1, "better →"),
)


def draw_figures(results: Results) -> dict[str, Figure]:
    """Draws what the study found, by name of the file."""
    return {
        "methods": draw_methods(results),
        "corruptions": draw_corruptions(results),
        "tuning": draw_tuning(results),
        **({"draws": draw_draws(results)} if results.first_draws else {}),
    }


@matplotlib.rc_context(STYLE)
def draw_methods(results: Results) -> Figure:
    """Draws every method's NLL, ECE and AUROC, with its ± and, hollow, with a temperature."""
    rows = dict(reversed(results.methods.items()))
    figure = Figure(figsize=(FULL, 0.9 + 0.21 * len(rows)), layout="constrained")
    for axes, (key, label, factor, better) in _make_panels(figure, sharey=True):
        for kind, name, colour, face in (
            ("plain", "as it is", BLUE, BLUE),
            ("tempered", "with temperature", GREEN, "white"),
        ):
            found = [getattr(row, kind).scores[key].times(factor) for row in rows.values()]
            look: Any = {"fmt": "o", "color": colour, "markerfacecolor": face, "elinewidth": 0.8}
            values, deviations = [one.value for one in found], [one.std or 0 for one in found]
            axes.errorbar(values, range(len(rows)), xerr=deviations, label=name, **look)
        if "ensemble" in rows:
            value = factor * rows["ensemble"].plain.scores[key].value
            axes.axvline(value, color=INK, linewidth=0.7, linestyle=":", label="Deep Ensembles, as they are")
        axes.set_xlabel(f"{label}\n{better}")
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.set_yticks(range(len(rows)), [METHODS[method].label for method in rows])
        axes.set_ylim(-0.7, len(rows) - 0.3)
    add_legend(figure, figure.axes[0])
    return figure


@matplotlib.rc_context(STYLE)
def draw_corruptions(results: Results) -> Figure:
    """Draws NLL and ECE less those of one plain network against the strength of corruption, a column for each kind."""
    figure = Figure(figsize=(FULL, 4.6), layout="constrained")
    grid = figure.subplots(2, len(CORRUPTIONS), sharex=True, sharey="row")
    reference = results.methods["plain"].plain.corruptions
    for column, kind in zip(grid.T, CORRUPTIONS, strict=True):
        for method in (key for key in _CURVES if key in results.methods):
            found = results.methods[method].plain.corruptions
            for axes, key, factor in zip(column, ("nll", "ece"), (1, 100), strict=True):
                strengths = [f"{kind} {strength}" for strength in STRENGTHS]
                differences = [factor * (found[name][key] - reference[name][key]) for name in strengths]
                axes.plot(STRENGTHS, differences, marker="o", **line(METHODS[method]) | {"linestyle": "-"})
        column[0].set_title(kind.capitalize())
        column[1].set(xlabel="Strength", xticks=STRENGTHS)
    grid[0, 0].set_ylabel("Δ NLL, nats (↓ better)")
    grid[1, 0].set_ylabel("Δ ECE, points (↓ better)")
    add_legend(figure, grid[0, 0])
    return figure


@matplotlib.rc_context(STYLE)
def draw_tuning(results: Results) -> Figure:
    """Draws the validation NLL against the spread for each family: the mean over networks, ± one standard deviation.

    The axis shows the minima: how high the NLL of the widest draws is, nobody needs to know.
    """
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    axes = figure.subplots()
    shown: list[float] = []
    tried: set[float] = set()
    for key, row in results.methods.items():
        method = METHODS[key]
        if method.group != "network" or not method.drawing.tuned or method.drawing.tempered:
            continue
        curves = [dict(choice.curve) for choice in row.choices]
        spreads = sorted(set.intersection(*map(set, curves)))  # a search may have gone on for some networks
        losses = np.array([[curve[spread] for spread in spreads] for curve in curves])
        mean, std = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(spreads))
        axes.plot(spreads, mean, marker=_MARKERS[len(axes.lines) % 4], **line(method) | {"linestyle": "-"})
        axes.fill_between(spreads, mean - std, mean + std, color=method.colour, alpha=0.12, linewidth=0)
        # The better half, the fitted spread, and the narrowest.
        shown += [*sorted(mean)[: (len(mean) + 1) // 2], mean[spreads.index(1.0)], mean[0]]
        tried |= set(spreads)
    axes.set(xscale="log", xlabel="Spread k", ylabel="Validation NLL, nats")
    plots.label_powers(axes, sorted(tried))
    plots.show_lowest(axes, shown)
    add_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def draw_draws(results: Results) -> Figure:
    """Draws NLL, ECE and AUROC of one network against the number of draws, ± over networks, beside Deep Ensembles."""
    figure = Figure(figsize=(FULL, 2.9), layout="constrained")
    ensemble = results.methods.get("ensemble")
    for axes, (key, label, factor, _) in _make_panels(figure):
        for method, rows in results.first_draws.items():
            counts = [row.num_samples for row in rows]
            look = line(METHODS[method])
            mean = np.array([factor * row.scores[key] for row in rows])
            std = np.array([factor * row.std.get(key, 0.0) for row in rows])
            axes.plot(counts, mean, marker=_MARKERS[len(axes.lines) % 4], **look)
            axes.fill_between(counts, mean - std, mean + std, color=look["color"], alpha=0.12, linewidth=0)
        if ensemble:
            value = factor * ensemble.plain.scores[key].value
            axes.axhline(value, color=BLUE, label=f"Deep Ensembles ({len(ensemble.seeds)})")
        axes.set(xscale="log", xlabel="Draws", title=f"{label} ({'↑' if key == 'auroc_entropy' else '↓'} better)")
        plots.label_powers(axes, counts[::2] if len(counts) > 4 else counts)
    add_legend(figure, figure.axes[0])
    return figure


def _make_panels(figure: Figure, **options: Any) -> Iterator[tuple[Axes, tuple[str, str, float, str]]]:
    """Yields axes for NLL, ECE and AUROC, with the key of the score, its label, its factor and where better is."""
    return zip(figure.subplots(1, len(_PANELS), **options), _PANELS, strict=True)
