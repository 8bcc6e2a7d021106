"""The numbers of the study → figures. Pure functions."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.report.figures import BLUE, FULL, GREEN, ORANGE, PURPLE, STYLE, VERMILION
from stochbn.experiments.study.results import TEMPERED
from stochbn.experiments.study.study import EXHAUSTIVE, LAST

# Whose curves are drawn, and how.
LOOKS: dict[str, dict[str, Any]] = {
    "One network": {"color": "#777777", "linewidth": 1.0},
    "SBN": {"color": GREEN, "linestyle": "--"},
    "SBN, tuned": {"color": GREEN},
    EXHAUSTIVE: {"color": PURPLE, "linestyle": "--"},
    f"{LAST}, tuned": {"color": PURPLE},
    "Dropout": {"color": VERMILION},
    "Deep Ensembles": {"color": BLUE},
    "Deep Ensembles + last layer": {"color": ORANGE},
}


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws what the study found, by name of the file."""
    return {
        "methods": draw_methods(results),
        "corruptions": draw_corruptions(results),
        "tuning": draw_tuning(results),
        **({"draws": draw_draws(results)} if results["draws"] else {}),
    }


@matplotlib.rc_context(STYLE)
def draw_methods(results: dict[str, Any]) -> Figure:
    """Draws every method's NLL, ECE and AUROC, with its ± and, hollow, with a temperature."""
    names = [name for name in results["methods"] if not name.endswith(TEMPERED)][::-1]
    figure = Figure(figsize=(FULL, 0.5 + 0.21 * len(names)), layout="constrained")
    panels = (("nll", "NLL", 1), ("ece", "ECE, %", 100), ("auroc_entropy", "AUROC", 1))
    for axes, (key, label, factor) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for suffix, look in (("", {"marker": "o"}), (TEMPERED, {"marker": "o", "markerfacecolor": "white"})):
            found = [results["methods"][name + suffix]["scores"][key] for name in names]
            axes.errorbar(
                [factor * one["value"] for one in found],
                range(len(names)),
                xerr=[factor * (one["std"] or 0) for one in found],
                linestyle="",
                color=GREEN if suffix else BLUE,
                elinewidth=0.8,
                label="with temperature" if suffix else "as it is",
                **look,
            )
        if "Deep Ensembles" in names:
            axes.axvline(
                factor * results["methods"]["Deep Ensembles"]["scores"][key]["value"], color="black", linewidth=0.7
            )
        axes.set_xlabel(label)
        axes.set_yticks(range(len(names)), names)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_corruptions(results: dict[str, Any]) -> Figure:
    """Draws NLL and ECE against the strength of corruption, a column for each kind."""
    figure = Figure(figsize=(FULL, 4.8), layout="constrained")
    grid = figure.subplots(2, len(CORRUPTIONS), sharex=True, sharey="row")
    for column, kind in zip(grid.T, CORRUPTIONS, strict=True):
        for name, look in LOOKS.items():
            if name in results["corruptions"]:
                found = [results["corruptions"][name][f"{kind} {strength}"] for strength in STRENGTHS]
                column[0].plot(STRENGTHS, [one["nll"] for one in found], marker="o", label=name, **look)
                column[1].plot(STRENGTHS, [100 * one["ece"] for one in found], marker="o", **look)
        column[0].set(title=kind.capitalize(), yscale="log")
        column[1].set(xlabel="Strength", xticks=STRENGTHS)
    grid[0, 0].set_ylabel("NLL, nats")
    grid[1, 0].set_ylabel("ECE, %")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_tuning(results: dict[str, Any]) -> Figure:
    """Draws the validation NLL against the spread for each family: the mean over networks, ± one standard deviation."""
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = iter((GREEN, VERMILION, BLUE, ORANGE, PURPLE, "#777777", "black"))
    for name, found in results["tuning"].items():
        if name.startswith(("Members", "Dropout")) or name.endswith("by layer") or name == EXHAUSTIVE:
            continue
        curves = [{spread: loss for spread, _, loss in one["curve"]} for one in found]
        spreads = sorted(set.intersection(*map(set, curves)))  # a search may have gone on for some networks
        losses = np.array([[curve[spread] for spread in spreads] for curve in curves])
        mean, std = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(spreads))
        colour = next(colours)
        axes.plot(spreads, mean, marker="o", color=colour, label=name.removesuffix(", tuned"))
        axes.fill_between(spreads, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="Spread k", ylabel="Validation NLL, nats")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend()
    return figure


@matplotlib.rc_context(STYLE)
def draw_draws(results: dict[str, Any]) -> Figure:
    """Draws NLL, ECE and AUROC of one network against the number of draws, with Deep Ensembles as a line."""
    figure = Figure(figsize=(FULL, 2.6), layout="constrained")
    panels = (("nll", "NLL, nats", 1), ("ece", "ECE, %", 100), ("auroc_entropy", "AUROC", 1))
    for axes, (key, label, factor) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, rows in results["draws"].items():
            counts = [row["num_samples"] for row in rows]
            axes.plot(counts, [factor * row[key] for row in rows], marker="o", label=name, **LOOKS.get(name, {}))
        ensemble = results["methods"].get("Deep Ensembles")
        if ensemble:
            value = factor * ensemble["scores"][key]["value"]
            axes.axhline(value, color=BLUE, label=f"Deep Ensembles ({len(ensemble['seeds'])})")
        axes.set(xscale="log", xlabel="Draws", title=label)
        axes.set_xticks(counts[::2], [f"{count:.0f}" for count in counts[::2]])
        axes.minorticks_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
