"""The numbers of the study → figures. Pure functions."""

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.methods import BLUE, GREEN, METHODS
from stochbn.experiments.report.figures import FULL, STYLE, line
from stochbn.experiments.study.results import Results

# Whose curves are drawn against the strength of corruption.
_CURVES = ("plain", "sbn", "tuned", "real-tuned", "last-tuned", "dropout", "ensemble", "ensemble+last")
_PANELS = (("nll", "NLL, nats", 1), ("ece", "ECE, %", 100), ("auroc_entropy", "AUROC", 1))


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
    figure = Figure(figsize=(FULL, 0.5 + 0.21 * len(rows)), layout="constrained")
    for axes, key, label, factor in _make_panels(figure, sharey=True):
        for kind, name, colour, face in (
            ("plain", "as it is", BLUE, BLUE),
            ("tempered", "with temperature", GREEN, "white"),
        ):
            found = [getattr(row, kind).scores[key].times(factor) for row in rows.values()]
            look: Any = {"fmt": "o", "color": colour, "markerfacecolor": face, "elinewidth": 0.8}
            values, deviations = [one.value for one in found], [one.std or 0 for one in found]
            axes.errorbar(values, range(len(rows)), xerr=deviations, label=name, **look)
        if "ensemble" in rows:
            axes.axvline(factor * rows["ensemble"].plain.scores[key].value, color="black", linewidth=0.7)
        axes.set_xlabel(label)
        axes.set_yticks(range(len(rows)), [METHODS[method].label for method in rows])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_corruptions(results: Results) -> Figure:
    """Draws NLL and ECE against the strength of corruption, a column for each kind."""
    figure = Figure(figsize=(FULL, 4.8), layout="constrained")
    grid = figure.subplots(2, len(CORRUPTIONS), sharex=True, sharey="row")
    for column, kind in zip(grid.T, CORRUPTIONS, strict=True):
        for method in (key for key in _CURVES if key in results.methods):
            found = [results.methods[method].plain.corruptions[f"{kind} {strength}"] for strength in STRENGTHS]
            look = line(METHODS[method])
            column[0].plot(STRENGTHS, [one["nll"] for one in found], marker="o", **look)
            column[1].plot(STRENGTHS, [100 * one["ece"] for one in found], marker="o", **look)
        column[0].set(title=kind.capitalize(), yscale="log")
        column[1].set(xlabel="Strength", xticks=STRENGTHS)
    grid[0, 0].set_ylabel("NLL, nats")
    grid[1, 0].set_ylabel("ECE, %")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_tuning(results: Results) -> Figure:
    """Draws the validation NLL against the spread for each family: the mean over networks, ± one standard deviation."""
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, row in results.methods.items():
        method = METHODS[key]
        if method.group != "network" or not method.drawing.tuned:
            continue
        curves = [dict(choice.curve) for choice in row.choices]
        spreads = sorted(set.intersection(*map(set, curves)))  # a search may have gone on for some networks
        losses = np.array([[curve[spread] for spread in spreads] for curve in curves])
        mean, std = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(spreads))
        axes.plot(spreads, mean, marker="o", **line(method))
        axes.fill_between(spreads, mean - std, mean + std, color=method.colour, alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="Spread k", ylabel="Validation NLL, nats")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend()
    return figure


@matplotlib.rc_context(STYLE)
def draw_draws(results: Results) -> Figure:
    """Draws NLL, ECE and AUROC of one network against the number of draws, with Deep Ensembles as a line."""
    figure = Figure(figsize=(FULL, 2.6), layout="constrained")
    ensemble = results.methods.get("ensemble")
    for axes, key, label, factor in _make_panels(figure):
        for method, rows in results.first_draws.items():
            counts = [row.num_samples for row in rows]
            axes.plot(counts, [factor * row.scores[key] for row in rows], marker="o", **line(METHODS[method]))
        if ensemble:
            value = factor * ensemble.plain.scores[key].value
            axes.axhline(value, color=BLUE, label=f"Deep Ensembles ({len(ensemble.seeds)})")
        axes.set(xscale="log", xlabel="Draws", title=label)
        axes.set_xticks(counts[::2], [f"{count:.0f}" for count in counts[::2]])
        axes.minorticks_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _make_panels(figure: Figure, **options: Any) -> Iterator[tuple[Axes, str, str, float]]:
    """Yields axes for NLL, ECE and AUROC, with the key of the score, its label and its factor."""
    for axes, panel in zip(figure.subplots(1, len(_PANELS), **options), _PANELS, strict=True):
        yield axes, *panel
