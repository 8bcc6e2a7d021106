import itertools

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from stochbn.experiments.files import PARTS
from stochbn.experiments.report import figures
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.report import draw_all, read_files
from stochbn.experiments.report.scores import score
from stochbn.uncertainty import error


@pytest.fixture(scope="module")
def labels(results):
    return [scored.short_label for scored in results.methods.values()]


def test_every_method_has_a_curve(results, labels):
    for part in PARTS:
        axes = figures.draw_ecdf(results, part).axes[0]
        assert axes.get_yscale() == ("log" if part == "test" else "linear")
        assert [line.get_label() for line in axes.lines] == labels
        assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "-", "--", "-", "--"]
        assert all(np.ptp(line.get_ydata()) > 0.9 for line in axes.lines)
    assert len(figures.draw_rejection(results).axes[0].lines) == 6


def test_of_many_methods_those_that_differ_are_drawn(cifar5):
    results = collect(read_files(cifar5)[0])
    drawn = [scored.method.key for scored in figures.select_curves(results)]
    ensembles = ["ensemble", "ensemble+sbn", "ensemble+last-tuned"]
    assert drawn == ["plain", "sbn", "last-tuned", *ensembles, "dropout", "dropout+sbn"]


def test_a_legend_fits_above_its_figure(cifar5):
    """Also of an ensemble that says how few networks it has."""
    results = collect(read_files(cifar5)[0])
    for figure in (figures.draw_ecdf(results, "test"), figures.draw_reliability(results)):
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_colours_are_the_methods_everywhere(results, labels):
    drawn = (figures.draw_ecdf(results, "test"), figures.draw_reliability(results), figures.draw_rejection(results))
    colours = {}
    for axes in (axes for figure in drawn for axes in figure.axes):
        for line in axes.lines:
            if line.get_label() in labels:
                colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert {label: len(found) for label, found in colours.items()} == dict.fromkeys(labels, 1)
    assert colours["Dropout"] == colours["Dropout + SBN"] != colours["Deep Ensembles (3 of 6)"]


def test_reliability_diagrams_agree_with_the_calibration_error(results):
    figure = figures.draw_reliability(results)
    assert len(figure.axes) == 6
    assert [axes.get_title() for axes in figure.axes[:3]] == ["One network", "Deep Ensembles", "Dropout"]
    assert all(len(axes.containers) == 2 for axes in figure.axes[:3])  # without and with SBN, each with intervals
    drawn, shares = figure.axes[1].containers[0].lines[0], figure.axes[4].patches[0].get_data().values
    gaps = abs(drawn.get_xdata() - drawn.get_ydata())
    assert shares[shares > 1e-8] @ gaps == pytest.approx(score(results)["ensemble"]["ece"].value)


def test_networks_are_places_of_an_input(results):
    probs, labels = figures.stack_networks(results.methods["sbn"], results)
    assert probs.shape == (400, 10, 3)
    assert 100 * error(probs, labels).item() == pytest.approx(score(results)["sbn"]["error_percent"].value)


def test_rejection_ends_with_the_error_of_all(results):
    axes = figures.draw_rejection(results).axes[0]
    for line, found in zip(axes.lines, score(results).values(), strict=True):
        assert line.get_ydata()[-1] == pytest.approx(found["error_percent"].value)
        assert line.get_ydata()[0] == 0


def test_no_tick_label_touches_another(results, diagnostics, lenet5, cifar5):
    """Labels of one axis, as they are drawn."""
    drawn = draw_all(results, read_files(lenet5)[0], diagnostics)
    files = read_files(cifar5)[0]
    drawn |= {f"cifar5 {name}": figure for name, figure in draw_all(collect(files), files, None).items()}
    for name, figure in drawn.items():
        figure.draw_without_rendering()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            boxes = [tick.label1.get_window_extent() for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
            boxes = [box for box in boxes if box.width > 1]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)), (name, axis)


def test_training_has_a_line_for_each_network(lenet5, cifar5):
    assert len(figures.draw_training(read_files(lenet5)[0]).axes[0].lines) == 5
    lines = figures.draw_training(read_files(cifar5)[0]).axes[0].lines  # with the training loss
    assert [line.get_linestyle() for line in lines] == ["-", ":"] * 5
    assert lines[1].get_ydata()[-1] == pytest.approx(0.04)


def test_drawing_leaves_matplotlib_as_it_was(results):
    before = dict(matplotlib.rcParams)
    assert isinstance(figures.draw_rejection(results), Figure)
    assert dict(matplotlib.rcParams) == before
