"""Networks that are trained for seconds, and the page that shows what they say."""

import io
import math

import pytest
from rich.console import Console

from benchmarks.play import serving
from stochbn.experiments.training.recipes import RECIPES
from stochbn.play.panel import Panel, load_panel

QUICK = RECIPES["digits"].vary(epochs=6)  # still more than 19 of 20 digits right


@pytest.fixture(scope="session")
def panel(tmp_path_factory) -> Panel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCHBN_DATA", str(tmp_path_factory.mktemp("play")))
        return load_panel(Console(file=io.StringIO()), QUICK)


@pytest.fixture(scope="session")
def address(panel):
    """Where a real server answers."""
    with serving(panel) as port:
        yield f"http://127.0.0.1:{port}"


def arc(x, y, width, height, start, end):
    """Points of an ellipse, from one angle to another in degrees."""
    angles = [math.radians(start + (end - start) * n / 24) for n in range(25)]
    return [[x + width * math.cos(angle), y + height * math.sin(angle)] for angle in angles]


@pytest.fixture(scope="session")
def drawn():
    """Strokes on a paper of 100 × 100, by what they show."""
    return {
        "0": [arc(50, 50, 28, 45, -90, 270)],
        "1": [[[38, 25], [55, 8], [55, 92]]],
        "3": [arc(48, 28, 22, 20, -150, 90) + arc(48, 70, 26, 22, -90, 150)],
        "4": [[[58, 8], [22, 60], [80, 60]], [[62, 35], [62, 94]]],
        "5": [[[72, 10], [36, 10], [32, 46], *arc(48, 66, 24, 24, -120, 140)]],
        "A": [[[20, 92], [50, 8], [80, 92]], [[32, 62], [68, 62]]],
        "K": [[[28, 8], [28, 92]], [[72, 8], [28, 52], [74, 92]]],
    }
