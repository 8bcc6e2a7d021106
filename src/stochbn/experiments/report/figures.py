"""Figures of predictions: entropy, calibration, rejection, training. One colour a method.

Lines and colours are those of the table of methods. Sizes are those of print: text of 8 points or more on a page 6.5
inches wide.
"""

import io
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS, Method
from stochbn.experiments.report.collect import has_dropout
from stochbn.experiments.report.scores import NUM_BINS, Output, Results, Scored, Values, ecdf, find_bins

FULL, NARROW = 6.5, 5.0  # inches
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "svg.hashsalt": "stochbn",
}
_NUM_POINTS = 400
_MIN_IN_BIN = 20
# Whose curves are drawn; more would hide each other, and are in the tables.
_CURVES = {
    *("plain", "sbn", "tuned", "last", "last-tuned", "dropout", "dropout+sbn", "dropout+tuned"),
    *("ensemble", "ensemble+sbn", "ensemble+last", "ensemble+last-tuned"),
}
# Drawn in place of the fitted, where it is there.
_TUNED = {"last": "last-tuned", "ensemble+last": "ensemble+last-tuned"}


def render(figure: Figure) -> dict[str, bytes]:
    """Returns the figure as PNG and SVG, by file ending; the same bytes every time.

    Examples:
        >>> render(Figure(figsize=(1, 1)))["png"][1:4]
        b'PNG'
    """
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    files = {}
    with matplotlib.rc_context(STYLE):
        engine = figure.get_layout_engine()
        if engine is not None:  # arranges once, for both files
            engine.execute(figure)
            figure.set_layout_engine("none")
        for kind, entries in metadata.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=200, metadata=entries)
            files[kind] = buffer.getvalue()
    return files


@matplotlib.rc_context(STYLE)
def draw_ecdf(results: Results, part: str) -> Figure:
    """Draws the ECDF of the entropy on a part of the data, over all networks of a method; log axis for known data."""
    figure = Figure(figsize=(NARROW, 3.6), layout="constrained")
    axes = figure.subplots()
    highest = math.log(len(results.header["classes"]))
    known = part == "test"
    thresholds = np.geomspace(1e-6, highest, _NUM_POINTS) if known else np.linspace(0, highest, _NUM_POINTS)
    for scored in select_curves(results):
        axes.plot(thresholds, ecdf(scored.pooled_entropy(part), thresholds), **line(scored.method, scored.short_label))
    if known:
        axes.set_xscale("log")
    axes.set(
        xlim=(thresholds[0], highest),
        ylim=(0, 1.005),
        xlabel="Entropy of the prediction, nats",
        ylabel=f"Share of {'known' if known else 'out-of-domain'} inputs at or below",
    )
    _add_legend(figure, axes)
    return figure


@matplotlib.rc_context(STYLE)
def draw_reliability(results: Results) -> Figure:
    """Draws accuracy against confidence in 15 equal bins, and the share of inputs in each; a column for each pair."""
    titles = {"network": "One network", "ensemble": "Deep Ensembles", "dropout": "Dropout"}
    columns: dict[str, list[Scored]] = {}
    for scored in select_curves(results):  # in the order of the titles
        columns.setdefault(titles[scored.method.group], []).append(scored)
    figure = Figure(figsize=(FULL if len(columns) > 1 else NARROW, 3.9), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="row", height_ratios=(2.4, 1), squeeze=False)
    edges = np.linspace(0, 1, NUM_BINS + 1)
    for (upper, lower), (title, members) in zip(grid.T, columns.items(), strict=True):
        upper.plot([0, 1], [0, 1], color="black", linewidth=0.7, linestyle=":")
        for scored in members:
            confidence, accuracy, share, count = bin_confidence(scored, results)
            enough = count >= _MIN_IN_BIN
            look = line(scored.method, scored.short_label)
            upper.plot(confidence[enough], accuracy[enough], marker="o", **look)
            lower.stairs(np.maximum(share, 1e-9), edges, **look)
        upper.set(title=title, xlim=(0, 1.02), ylim=(0, 1.02))
        lower.set(yscale="log", ylim=(5e-5, 1.5), xlabel="Confidence")
    grid[0, 0].set_ylabel("Accuracy")
    grid[1, 0].set_ylabel("Share of inputs")
    _add_legend(figure, *grid[0])
    return figure


def bin_confidence(scored: Scored, results: Results) -> tuple[Values, Values, Values, Values]:
    """Returns each bin's mean confidence, accuracy, share and number of inputs, over all networks of a method.

    Examples:
        >>> import torch
        >>> output = {"test": Output(torch.tensor([[0.75, 0.25], [0.75, 0.25]]))}
        >>> scored = Scored(METHODS["sbn"], (0,), (output,), (output,))
        >>> results = Results({}, torch.tensor([0, 1]), {"sbn": scored}, False)
        >>> [values[11].item() for values in bin_confidence(scored, results)]
        [0.75, 0.5, 1.0, 2.0]
    """
    pairs = [output["test"].probs.double().max(1) for output in scored.outputs]
    confidence = np.concatenate([found.values.numpy() for found in pairs])
    correct = np.concatenate([(found.indices == results.labels).double().numpy() for found in pairs])
    bins = find_bins(confidence)
    count = np.bincount(bins, minlength=NUM_BINS).astype(np.float64)
    sums = (np.bincount(bins, weights=values, minlength=NUM_BINS) for values in (confidence, correct))
    mean_confidence, accuracy = (total / np.maximum(count, 1) for total in sums)
    return mean_confidence, accuracy, count / len(bins), count


@matplotlib.rc_context(STYLE)
def draw_rejection(results: Results) -> Figure:
    """Draws the accuracy on what is left when the inputs of highest entropy are rejected, the mean over networks."""
    figure = Figure(figsize=(NARROW, 3.6), layout="constrained")
    axes = figure.subplots()
    curves = [
        (scored, np.mean([accuracy_kept(output["test"], results) for output in scored.outputs], axis=0))
        for scored in select_curves(results)
    ]
    worst = min(curve[0] for _, curve in curves)
    num = len(results.labels)
    for scored, curve in curves:
        axes.plot(100 * np.arange(num) / num, 100 * curve, **line(scored.method, scored.short_label))
    axes.set(
        xlim=(0, min(50, max(2, 1000 * (1 - worst)))),
        ylim=(None, 100 + 2 * (1 - worst)),
        xlabel="Rejected, the most uncertain first, %",
        ylabel="Accuracy on the rest, %",
    )
    _add_legend(figure, axes)
    return figure


def accuracy_kept(output: Output, results: Results) -> Values:
    """Returns the accuracy on the inputs that are kept when 0, 1, …, N − 1 of highest entropy are rejected."""
    order = np.argsort(output.entropy, kind="stable")
    correct = (output.probs.argmax(1) == results.labels).double().numpy()[order]
    kept = np.arange(1, len(correct) + 1)
    accuracies: Values = (np.cumsum(correct) / kept)[::-1]
    return accuracies


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
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    _add_legend(figure, axes)
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


def _add_legend(figure: Figure, *axes: Axes) -> None:
    """Adds one legend for all axes, above them, in as many columns as fit."""
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = min(3, math.ceil(len(handles) / 2)) if len(handles) > 2 else len(handles)
    while columns > 1:  # at 8 points: a line and the space around it 0.62 inches, a letter 0.06
        parts = np.array_split(list(handles), columns)
        if sum(0.62 + 0.06 * max(map(len, part)) for part in parts) <= figure.get_figwidth():
            break
        columns -= 1
    more_rows = math.ceil(len(handles) / max(columns, 1)) - 2
    figure.set_figheight(figure.get_figheight() + 0.16 * max(0, more_rows))  # two are in the figure's own height
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns)
