"""Results → one figure: ratios to plain passes by network and N, and growth with S and N."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from benchmarks.contenders import (
    CONTENDERS,
    ENSEMBLE,
    EXACT,
    EXPORTED,
    LAPLACE,
    LAST_LAYER,
    MC_DROPOUT,
    OURS,
    PAPER_LOOP,
    PLAIN,
    PLAIN_COMPILED,
    PREPARED,
    PREPARED_COMPILED,
    STORED,
)
from benchmarks.subjects import KINDS
from benchmarks.targets import RATIOS, growth_medians
from stochbn.experiments.methods import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from stochbn.pages.figures import FULL, STYLE

# Colour and marker both distinguish contenders.
LOOKS: dict[str, dict[str, Any]] = {
    PLAIN.name: {"color": "black", "marker": "", "linestyle": ":"},
    OURS.name: {"color": GREEN, "marker": "o", "linestyle": ":", "linewidth": 2},
    PREPARED.name: {"color": GREEN, "marker": "o", "linewidth": 2},
    PREPARED_COMPILED.name: {"color": GREEN, "marker": "s", "linestyle": "--", "linewidth": 2},
    EXPORTED.name: {"color": GREEN, "marker": "x", "linestyle": "-."},
    LAST_LAYER.name: {"color": BLUE, "marker": "o", "linewidth": 2},
    PLAIN_COMPILED.name: {"color": "black", "marker": "s", "linestyle": "--"},
    PAPER_LOOP.name: {"color": VERMILION, "marker": "^"},
    STORED.name: {"color": ORANGE, "marker": "v"},
    MC_DROPOUT.name: {"color": PURPLE, "marker": "D"},
    ENSEMBLE.name: {"color": BLUE, "marker": "P"},
    EXACT.name: {"color": GREY, "marker": "X"},
    LAPLACE.name: {"color": SKY, "marker": "*"},
}


@matplotlib.rc_context(STYLE)
def draw(results: dict[str, Any]) -> Figure:
    """Draws the ratios above, at the largest S that was measured, and the growth below."""
    networks = list(dict.fromkeys(cell["network"] for cell in results["cells"]))
    growth = results["growth"]
    figure = Figure(figsize=(FULL, 7.0 if growth else 3.8), layout="constrained")
    parts: Any = figure.subfigures(1 + bool(growth), 1, squeeze=False, height_ratios=(1.35, 1)[: 1 + bool(growth)])[
        :, 0
    ]
    widths = [max(2.6, sum(cell["network"] == network for cell in results["cells"])) for network in networks]
    upper = parts[0].subplots(1, len(networks), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, network in zip(upper, networks, strict=True):
        _draw_ratios(axes, network, [cell for cell in results["cells"] if cell["network"] == network])
    upper[0].set_ylabel(f"Time / time of {max(results['settings']['samples'])} plain passes")
    handles = {label: handle for ax in upper for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    parts[0].legend(list(handles.values()), list(handles), loc="outside upper center", ncols=3)
    if growth:
        lower = parts[1].subplots(1, 2)
        _draw_growth(lower, growth)
        parts[1].legend(*lower[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _draw_ratios(axes: Axes, network: str, cells: list[dict[str, Any]]) -> None:
    most = max(cell["samples"] for cell in cells)
    cells = [cell for cell in cells if cell["samples"] == most]
    axes.axhline(1, **_line(PLAIN.name))
    for contender in CONTENDERS:
        if contender is PLAIN:
            continue
        points = [
            (i, c["contenders"][contender.name]["ratio"])
            for i, c in enumerate(cells)
            if contender.name in c["contenders"]
        ]
        if points:
            places = [place for place, _ in points]
            medians = [ratio["median"] for _, ratio in points]
            spread = [[r["median"] - r["q1"] for _, r in points], [r["q3"] - r["median"] for _, r in points]]
            axes.errorbar(places, medians, yerr=spread, elinewidth=0.8, **_line(contender.name))
    for place, cell in enumerate(cells):
        target = RATIOS.get(network, {}).get(cell["rows"]) if most == 50 else None
        if target is not None:
            axes.plot([place - 0.25, place + 0.25], [target] * 2, color="black", linewidth=2, label="target", zorder=3)
    axes.set(yscale="log", title=KINDS[network].name, xlabel="N", xlim=(-0.5, len(cells) - 0.5))
    axes.set_xticks(range(len(cells)), [str(cell["rows"]) for cell in cells])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_growth(grid: Any, growth: list[dict[str, Any]]) -> None:
    for axes, key, by, title in zip(
        grid, ("with_samples", "with_rows"), ("samples", "rows"), ("N = 1", "S = 10"), strict=True
    ):
        for found, marker in zip(growth, "osD^", strict=False):
            points = sorted(found[key], key=lambda point: int(point[by]))
            places = [point[by] for point in points]
            name = KINDS[found["network"]].name
            for contender, colour, style in ((OURS.name, GREEN, "-"), (PLAIN.name, "black", ":")):
                medians = [1e3 * seconds for seconds in growth_medians(points, contender)]
                label = f"{name}, {contender}"
                axes.plot(places, medians, color=colour, linestyle=style, marker=marker, label=label)
        axes.set(xscale="log", yscale="log", title=f"Growth at {title}", xlabel="S" if by == "samples" else "N")
        axes.set_xticks(places, [str(place) for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    grid[0].set_ylabel("Time, ms")


def _line(name: str) -> dict[str, Any]:
    return {"label": name, "markersize": 5, "linewidth": 1.2} | LOOKS[name]
