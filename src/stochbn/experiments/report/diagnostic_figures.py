"""Figures of the measurements on one network: Appendix B, the effect of S and of M; and the gallery."""

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from stochbn import plots
from stochbn.distributions.base import Layer
from stochbn.distributions.empirical import Empirical
from stochbn.experiments.files import File
from stochbn.experiments.methods import GREEN, METHODS, ORANGE, PURPLE, SKY
from stochbn.experiments.report.figures import line
from stochbn.pages.figures import FULL, INK, NARROW, STYLE
from stochbn.statistics.moments import Moments

GALLERY = {
    "certain test": "Known,\nmost certain",
    "uncertain test": "Known,\nleast certain",
    "certain out-of-domain": "Out-of-domain,\nmost certain",
    "uncertain out-of-domain": "Out-of-domain,\nleast certain",
}
_STATISTICS = ("channels", "observed", "centre", "std", "ks")
_GALLERY = ("images", "entropy", "predicted", "labels")


@matplotlib.rc_context(STYLE)
def draw_effect(rows: list[dict[str, float]], key: str) -> Figure:
    """Draws NLL, mean entropy and AUROC of one network with SBN against `num_samples` or `batch_size`."""
    figure = Figure(figsize=(FULL, 2.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    x = [row[key] for row in rows]
    sbn = line(METHODS["sbn"]) | {"marker": "o"}
    left.plot(x, [row["nll"] for row in rows], **sbn)
    left.set_title("NLL on known data, nats")
    for name, part, marker in (("known", "entropy_test", "s"), ("out-of-domain", "entropy_out_of_domain", "o")):
        middle.plot(x, [row[part] for row in rows], **sbn | {"label": name, "marker": marker})
    middle.legend(handlelength=1.8)
    middle.set_title("Mean entropy, nats")
    middle.set_ylim(bottom=0)
    right.plot(x, [row["auroc"] for row in rows], **sbn)
    right.set_title("AUROC by entropy")
    for axes in (left, middle, right):
        axes.set_xscale("log")
        # All of a few powers of two; of a longer range, 1, 10 and 100: more would touch each other.
        axes.set_xticks(x if len(x) < 7 else [value for value in x if math.log10(value).is_integer()])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xlabel({"num_samples": "Samples S", "batch_size": "Mini-batch size M"}[key])
    return figure


@matplotlib.rc_context(STYLE)
def draw_statistics(file: File, layer: str) -> Figure:
    """Draws the density of a layer's real batch statistics against r(μ), above, and r(σ), below; a column a channel."""
    tensors = {name: file.tensors[f"statistics/{layer}/{name}"].double() for name in _STATISTICS}
    observed, count = tensors["observed"], float(len(tensors["observed"]))
    moments = Moments(count, count, tensors["centre"], tensors["std"].square() * (count - 1))
    stats = Empirical({layer: Layer(0.0, moments)}, 2, len(observed), observations=observed)
    channels = tensors["channels"].long().tolist()
    figure = Figure(figsize=(FULL, 3.6), layout="constrained")
    grid = figure.subplots(2, len(channels), squeeze=False)
    for column, channel in enumerate(channels):
        for row, of in enumerate(("mu", "sigma")):
            axes, distance = grid[row, column], float(tensors["ks"][row, channel])
            axes.set_prop_cycle(color=[SKY, GREEN])
            plots.layer_statistics(axes, stats, layer, channel=column, of=of)  # type: ignore[arg-type]
            axes.set_title(f"channel {channel}, {'constant' if math.isnan(distance) else f'KS {distance:.3f}'}")
            axes.grid(False)
            axes.spines["left"].set_visible(False)
            axes.xaxis.set_major_locator(MaxNLocator(3))
            axes.set_ylabel("" if column else "Density")
    handles, _ = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, ["Real mini-batches (KDE)", "Fitted r(μ), r(σ)"], loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_distances(file: File) -> Figure:
    """Draws the Kolmogorov-Smirnov distance of every channel and the quartiles, by layer, for μ and for σ."""
    layers = file.header["statistics"]["layers"]
    figure = Figure(figsize=(max(NARROW, min(FULL, 0.5 * len(layers))), 3.0), layout="constrained")
    axes = figure.subplots()
    random = np.random.default_rng(0)
    for row, (symbol, colour) in enumerate((("μ", ORANGE), ("σ", PURPLE))):
        for position, layer in enumerate(layers):
            distances = file.tensors[f"statistics/{layer}/ks"][row].numpy()
            distances = distances[~np.isnan(distances)]
            x = position + (row - 0.5) * 0.4
            jittered = x + random.uniform(-0.12, 0.12, len(distances))
            label = f"r({symbol})" if position == 0 else None
            axes.plot(jittered, distances, "o", color=colour, markersize=2, alpha=0.5, markeredgewidth=0, label=label)
            if len(distances):
                look: Any = {f"{part}props": {"color": INK, "linewidth": 0.8} for part in ("box", "whisker", "cap")}
                look |= {"medianprops": {"color": INK, "linewidth": 1.6}, "showfliers": False}
                axes.boxplot(distances, positions=[x], widths=0.3, **look)
    axes.set_xticks(range(len(layers)), [short_name(layer) for layer in layers], parse_math=False)
    if len(layers) > 6:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylabel="KS distance")
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, markerscale=3)
    return figure


@matplotlib.rc_context(STYLE)
def draw_gallery(file: File) -> Figure:
    """Draws the inputs with the lowest and the highest entropy: true class, predicted class and entropy under each."""
    header = file.header["gallery"]
    long = max(map(len, [*header["classes"], *header["out_of_domain_classes"]])) > 2
    figure = Figure(figsize=(FULL, 5.4 if long else 4.4))
    grid = figure.subplots(len(GALLERY), 6 if long else 8, squeeze=False)
    figure.subplots_adjust(left=0.155, right=0.99, top=0.99, bottom=0.1, wspace=0.12, hspace=0.6 if long else 0.75)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for row, (group, title) in zip(grid, GALLERY.items(), strict=True):
        images, entropies, predicted, labels = (file.tensors[f"gallery/{group}/{name}"] for name in _GALLERY)
        names = header["classes" if group.endswith(" test") else "out_of_domain_classes"]
        row[0].text(-0.2, 0.5, title, transform=row[0].transAxes, ha="right", va="center", fontsize=8)
        for axes, image, h, guess, label in zip(row, images, entropies, predicted, labels, strict=False):
            pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", vmin=0, vmax=255)
            axes.spines[:].set(visible=True, color="#808080")  # white letters would run into a white page
            arrow = "\n→ " if long else " → "
            entropy = f"{h:.2f}" if h >= 0.005 else "< 0.005"
            text = f"{names[int(label)]}{arrow}{header['classes'][int(guess)]}\n{entropy}"
            axes.text(0.5, -0.06, text, transform=axes.transAxes, ha="center", va="top", fontsize=8, parse_math=False)
    return figure


def short_name(layer: str) -> str:
    """Returns a layer's name without the part that all share.

    Examples:
        >>> short_name("conv1.norm")
        'conv1'
    """
    return layer.removesuffix(".norm")
