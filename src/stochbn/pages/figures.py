"""How figures look on a page, and as files: one style, and an SVG that follows the reader's light or dark scheme.

Sizes are those of print: text of 8 points or more on a page 6.5 inches wide.
"""

import io
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FULL, NARROW = 6.5, 5.0  # inches
INK, GRID = "#1b1d21", "#e4e4e4"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
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
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "svg.hashsalt": "stochbn",
}
# What a dark page has in place of a colour: ink, the grid, faces of hollow marks; blue and grey would be too dark.
_DARK = {
    INK: "#e7e9ec",
    "#000000": "#e7e9ec",
    GRID: "#33383f",
    "#ffffff": "#15171a",
    "#0072b2": "#4da6e0",
    "#777777": "#a0a6ae",
    "#808080": "#a0a6ae",
}


def render(figure: Figure) -> dict[str, bytes]:
    """Returns the figure as PNG and SVG, by file ending; the same bytes every time.

    The SVG has no background, and other colours where the reader's scheme is dark. The PNG is white.

    Examples:
        >>> render(Figure(figsize=(1, 1)))["png"][1:4]
        b'PNG'
    """
    options: dict[str, Any] = {"png": {"metadata": {"Software": None}}}
    options["svg"] = {"metadata": {"Date": None, "Creator": None}, "transparent": True}
    files = {}
    with matplotlib.rc_context(STYLE):
        engine = figure.get_layout_engine()
        if engine is not None:  # arranges once, for both files
            engine.execute(figure)
            figure.set_layout_engine("none")
        for kind, given in options.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=200, **given)
            files[kind] = buffer.getvalue()
    start = files["svg"].index(b">", files["svg"].index(b"<svg")) + 1  # after the opening tag
    files["svg"] = files["svg"][:start] + _dark_style().encode() + files["svg"][start:]
    return files


def _dark_style() -> str:
    """Returns rules that recolour by the inline styles that Matplotlib writes: other viewers show the light colours."""
    rules = [
        f'[style*="{attribute}: {light}"]{{{attribute}:{dark}!important}}'
        for light, dark in _DARK.items()
        for attribute in ("fill", "stroke")
    ]
    dark = f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
    return f"\n<style>:root{{color-scheme:light dark}}{dark}</style>"


def add_legend(figure: Figure, *axes: Axes) -> None:
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
