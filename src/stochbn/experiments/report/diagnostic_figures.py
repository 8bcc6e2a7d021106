"""Figures of the measurements on one network: Appendices A and B, the effect of S and of M; and the gallery."""

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
from scipy import stats

from stochbn.experiments.files import File
from stochbn.experiments.methods import GREEN, METHODS, ORANGE, PURPLE, SKY
from stochbn.experiments.report.figures import FULL, NARROW, STYLE, line
from stochbn.experiments.report.scores import Values

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
        ticks = x if len(x) < 7 else [value for value in x if value in (1, 2, 5, 10, 20, 50, 100)]
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xlabel({"num_samples": "Samples S", "batch_size": "Mini-batch size M"}[key])
    return figure


@matplotlib.rc_context(STYLE)
def draw_statistics(file: File, layer: str) -> Figure:
    """Draws the density of a layer's real batch statistics against r(μ), above, and r(σ), below; a column a channel."""
    tensors = {name: file.tensors[f"statistics/{layer}/{name}"].double().numpy() for name in _STATISTICS}
    channels = tensors["channels"].astype(int)
    figure = Figure(figsize=(FULL, 3.6), layout="constrained")
    grid = figure.subplots(2, len(channels), squeeze=False)
    for column, channel in enumerate(channels):
        for row, symbol in enumerate("μσ"):
            axes, observed = grid[row, column], tensors["observed"][:, row, column]
            centre, std = tensors["centre"][row, column], tensors["std"][row, column]
            if symbol == "σ":  # log(σ² + ε) is twice log σ
                observed = np.exp(observed / 2)
                fitted: Any = stats.lognorm(s=max(std / 2, 1e-12), scale=math.exp(centre / 2))
            else:
                fitted = stats.norm(centre, max(std, 1e-12))
            distance = tensors["ks"][row, channel]
            axes.set_title(f"channel {channel}, {'constant' if np.isnan(distance) else f'KS {distance:.3f}'}")
            axes.set_xlabel(symbol)
            _draw_density(axes, observed, fitted, constant=bool(np.isnan(distance)))
    for axes in grid[:, 0]:
        axes.set_ylabel("Density")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_density(axes: Axes, observed: Values, fitted: Any, *, constant: bool) -> None:
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    if constant or observed.std() <= 1e-7 * abs(observed.mean()):
        axes.axvline(observed.mean(), color=GREEN, linestyle="--")
        return
    low, high = np.quantile(observed, [0.001, 0.999])
    margin = 0.15 * (high - low)
    points = np.linspace(low - margin, high + margin, 250)
    density = stats.gaussian_kde(observed)(points)
    axes.fill_between(points, density, color=SKY, alpha=0.35, linewidth=0)
    axes.plot(points, density, color=SKY, linewidth=1, label="Real mini-batches (KDE)")
    axes.plot(points, fitted.pdf(points), color=GREEN, linestyle="--", label="Fitted r(μ), r(σ)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))


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
                look: Any = {f"{part}props": {"color": "black", "linewidth": 0.8} for part in ("box", "whisker", "cap")}
                look |= {"medianprops": {"color": "black", "linewidth": 1.6}, "showfliers": False}
                axes.boxplot(distances, positions=[x], widths=0.3, **look)
    axes.set_xticks(range(len(layers)), [short_name(layer) for layer in layers])
    if len(layers) > 6:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set(xlim=(-0.6, len(layers) - 0.4), ylabel="KS distance")
    axes.set_ylim(bottom=0)
    axes.grid(False, axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, markerscale=3)
    return figure


@matplotlib.rc_context(STYLE)
def draw_bound(bound: dict[str, Any]) -> Figure:
    """Draws the lower bound and the marginal log-likelihood with standard errors, at initialisation and trained."""
    figure = Figure(figsize=(NARROW, 2.8), layout="constrained")
    names = {"lower": "Lower bound\nE log p", "marginal": "Marginal\nlog E p"}
    stages = (("before", "At initialisation"), ("after", "Trained"))
    for axes, (stage, title) in zip(figure.subplots(1, 2), stages, strict=True):
        for x, key in enumerate(names):
            mean, deviation = bound[stage][key]
            axes.errorbar(x, mean, deviation, fmt="o", color="black", capsize=4, markersize=6)
        gap, deviation = bound[stage]["gap"]
        axes.set_title(f"{title}\ngap {gap:.2g} ± {deviation:.1g}")
        axes.set_xticks([0, 1], list(names.values()))
        axes.set_xlim(-0.6, 1.6)
        axes.margins(y=0.3)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.grid(False, axis="x")
    figure.axes[0].set_ylabel("Log-likelihood of an input, nats")
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
        axes.set_axis_off()
    for row, (group, title) in zip(grid, GALLERY.items(), strict=True):
        images, entropies, predicted, labels = (file.tensors[f"gallery/{group}/{name}"] for name in _GALLERY)
        names = header["classes" if group.endswith(" test") else "out_of_domain_classes"]
        row[0].text(-0.2, 0.5, title, transform=row[0].transAxes, ha="right", va="center", fontsize=8)
        for axes, image, h, guess, label in zip(row, images, entropies, predicted, labels, strict=False):
            pixels = image.permute(1, 2, 0).numpy()  # (H, W, C)
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", vmin=0, vmax=255)
            arrow = "\n→ " if long else " → "
            entropy = f"{h:.2f}" if h >= 0.005 else "< 0.005"
            text = f"{names[int(label)]}{arrow}{header['classes'][int(guess)]}\n{entropy}"
            axes.text(0.5, -0.06, text, transform=axes.transAxes, ha="center", va="top", fontsize=8)
    return figure


def short_name(layer: str) -> str:
    """Returns a layer's name without the part that all share.

    Examples:
        >>> short_name("conv1.norm")
        'conv1'
    """
    return layer.removesuffix(".norm")
