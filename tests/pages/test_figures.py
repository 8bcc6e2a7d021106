import re
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from stochbn.pages.figures import INK, STYLE, add_legend, render


@pytest.fixture(scope="module")
def rendered():
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2, 2))
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="black")
        axes.set_title("<b>$x</b>", parse_math=False)
        return render(figure)


def test_a_figure_follows_the_scheme_of_its_page(rendered):
    svg = rendered["svg"].decode()
    ElementTree.fromstring(svg)
    assert "prefers-color-scheme:dark" in svg
    for colour in (INK, "#000000", STYLE["grid.color"]):
        assert re.search(rf'style="[^"]*: {colour}', svg), "what the rules look for is what Matplotlib writes"
        assert f'[style*="stroke: {colour}"]' in svg


def test_a_figure_has_no_background_as_svg_and_a_white_one_as_png(rendered):
    svg = rendered["svg"].decode()
    assert not re.search(r'id="patch_\d+">\s*<path [^>]*style="fill: #ffffff"', svg)
    assert rendered["png"].startswith(b"\x89PNG")


def test_the_same_figure_gives_the_same_bytes():
    assert render(Figure(figsize=(1, 1))) == render(Figure(figsize=(1, 1)))


def test_one_legend_for_all_axes():
    figure = Figure(figsize=(5, 3), layout="constrained")
    for axes in figure.subplots(1, 2):
        for name in ("a", "b", "c"):
            axes.plot([0, 1], label=name)
    add_legend(figure, *figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
