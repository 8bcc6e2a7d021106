"""Figures of predictions: entropy, calibration, rejection, training. One colour a method.

Lines and colours are those of the table of methods. `stochbn.plots` draws the curves.
"""

import math
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from stochbn import plots
from stochbn.curves import bin_confidence
from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS, Method
from stochbn.experiments.report.collect import has_dropout
from stochbn.experiments.report.scores import NUM_BINS, Results, Scored
from stochbn.pages.figures import FULL, NARROW, STYLE, add_legend
from stochbn.uncertainty import error

# Whose curves are drawn; more would hide each other, and are in the tables.
_CURVES = {
    *("plain", "sbn", "tuned", "last", "last-tuned", "dropout", "dropout+sbn", "dropout+tuned"),
    *("ensemble", "ensemble+sbn", "ensemble+last", "ensemble+last-tuned"),
}
# Drawn in place of the fitted, where it is there.
_TUNED = {"last": "last-tuned", "ensemble+last": "ensemble+last-tuned"}


@matplotlib.rc_context(STYLE)
def draw_ecdf(results: Results, part: str) -> Figure:
    """Draws the ECDF of the entropy over all networks of a method; of known data the share above, on a log axis."""
    figure = Figure(figsize=(NARROW, 3.6), layout="constrained")
    axes, is_known = figure.subplots(), part == "test"
    for scored in select_curves(results):
        values = torch.from_numpy(scored.pooled_entropy(part))
        plots.entropies(axes, values, complementary=is_known, **line(scored.method, scored.short_label))
    axes.set_xlim(0, math.log(len(results.header["classes"])))
    axes.set_ylabel(f"Share of {'known inputs above' if is_known else 'out-of-domain inputs at or below'}")
    if is_known:
        axes.set_ylim(bottom=1 / len(results.labels))  # an input, of as many as the test has
    add_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def draw_reliability(results: Results) -> Figure:
    """Draws accuracy against confidence in equal bins, and the share of inputs in each; a column for each group."""
    titles = {"network": "One network", "ensemble": "Deep Ensembles", "dropout": "Dropout"}
    columns: dict[str, list[Scored]] = {}
    for scored in select_curves(results):  # in the order of the titles
        columns.setdefault(titles[scored.method.group], []).append(scored)
    figure = Figure(figsize=(FULL if len(columns) > 1 else NARROW, 3.9), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="row", height_ratios=(2.4, 1), squeeze=False)
    edges = np.linspace(0, 1, NUM_BINS + 1)
    for (upper, lower), (title, members) in zip(grid.T, columns.items(), strict=True):
        for scored in members:
            probs, labels = stack_networks(scored, results)
            look = line(scored.method, scored.short_label)
            plots.reliability(upper, probs, labels, num_bins=NUM_BINS, **look | {"linewidth": 0.8, "markersize": 3})
            count = bin_confidence(probs, labels, NUM_BINS).count
            lower.stairs((count / count.sum()).clamp_min(1e-9).numpy(), edges, **look)
        upper.set(title=title, xlabel="", ylabel="")
        lower.set(yscale="log", ylim=(5e-5, 1.5), xlabel="Confidence", xticks=[0, 0.5, 1])
        lower.xaxis.set_major_formatter("{x:g}")
    grid[0, 0].set_ylabel("Accuracy")
    grid[1, 0].set_ylabel("Share of inputs")
    add_legend(figure, *grid[0])
    return figure


def stack_networks(scored: Scored, results: Results) -> tuple[Tensor, Tensor]:
    """Returns the probabilities that a method's networks give to test inputs, (N, K, R), and the labels, (N, R).

    So networks are places of an input, which intervals do not take for independent.
    """
    probs = torch.stack([output["test"].probs.double() for output in scored.outputs], dim=2)
    return probs, results.labels.unsqueeze(1).expand(-1, probs.shape[2])


@matplotlib.rc_context(STYLE)
def draw_rejection(results: Results) -> Figure:
    """Draws the error on what is answered when the inputs of highest entropy are rejected."""
    figure = Figure(figsize=(NARROW, 3.6), layout="constrained")
    axes, worst = figure.subplots(), 0.0
    for scored in select_curves(results):
        probs, labels = stack_networks(scored, results)
        worst = max(worst, float(error(probs, labels)))
        plots.risk_coverage(axes, probs, labels, **line(scored.method, scored.short_label))
    # Of ten times the error, rejected, the most certain half would show nothing.
    axes.set(xlim=(100 - min(50, max(2, 1000 * worst)), 100), ylim=(0, 110 * worst or 1))
    add_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def draw_training(files: list[File]) -> Figure:
    """Draws the validation NLL after each epoch, a line for each network; dotted the training loss, if it is kept."""
    figure = Figure(figsize=(NARROW, 3.0), layout="constrained")
    axes = figure.subplots()
    for file in files:
        method, kind = ("dropout", "With dropout") if has_dropout(file) else ("plain", "Without dropout")
        losses = {kind: (file.header["validation_nll"], "-"), f"{kind}, training": (file.header.get("train_loss"), ":")}
        for label, (values, style) in losses.items():
            if values:
                epochs = range(1, len(values) + 1)
                axes.plot(epochs, values, style, color=METHODS[method].colour, linewidth=0.9, label=label)
    has_training = any(file.header.get("train_loss") for file in files)
    axes.set(yscale="log", xlabel="Epoch", ylabel=f"{'' if has_training else 'Validation '}NLL, nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    add_legend(figure, axes)
    return figure


def select_curves(results: Results) -> list[Scored]:
    """Returns the methods that figures show."""
    methods = results.methods
    return [scored for key, scored in methods.items() if key in _CURVES and _TUNED.get(key) not in methods]


def line(method: Method, label: str | None = None) -> dict[str, Any]:
    """Returns how to draw a method's line.

    Examples:
        >>> line(METHODS["dropout+sbn"])["linestyle"], line(METHODS["dropout+tuned"])["linestyle"]
        ('--', ':')
    """
    return {
        "label": label or method.label,
        "color": method.colour,
        "linestyle": method.line,
        "linewidth": 1.0 if method.key == "plain" else 1.5,
    }
