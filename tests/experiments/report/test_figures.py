import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from stochbn.experiments.files import PARTS
from stochbn.experiments.report import figures
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.report import read_files
from stochbn.experiments.report.scores import score


@pytest.fixture(scope="module")
def labels(results):
    return [scored.label for scored in results.methods.values()]


def test_every_method_has_a_curve(results, labels):
    for part in PARTS:
        axes = figures.draw_ecdf(results, part).axes[0]
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
    assert colours["Dropout"] == colours["Dropout + SBN"] != colours["Deep Ensembles (3 of 6 networks)"]


def test_reliability_diagrams_agree_with_the_calibration_error(results):
    figure = figures.draw_reliability(results)
    assert len(figure.axes) == 6
    assert [axes.get_title() for axes in figure.axes[:3]] == ["One network", "Deep Ensembles", "Dropout"]
    assert all(len(axes.lines) == 3 for axes in figure.axes[:3])  # the diagonal, without and with SBN
    confidence, accuracy, share, count = figures.bin_confidence(results.methods["ensemble"], results)
    assert count.sum() == 400
    assert (share * abs(confidence - accuracy)).sum() == pytest.approx(score(results)["ensemble"]["ece"].value)


def test_rejection_ends_with_the_most_certain(results):
    output = results.methods["sbn"].outputs[0]["test"]
    kept = figures.accuracy_kept(output, results)
    correct = output.probs.argmax(1).numpy() == results.labels.numpy()
    assert kept[0] == pytest.approx(correct.mean())
    assert kept[-1] == correct[output.entropy.argmin()]
    half = np.argsort(output.entropy)[:200]
    assert kept[200] == pytest.approx(correct[half].mean())


def test_training_has_a_line_for_each_network(lenet5, cifar5):
    assert len(figures.draw_training(read_files(lenet5)[0]).axes[0].lines) == 5
    lines = figures.draw_training(read_files(cifar5)[0]).axes[0].lines  # with the training loss
    assert [line.get_linestyle() for line in lines] == ["-", ":"] * 5
    assert lines[1].get_ydata()[-1] == pytest.approx(0.04)


def test_drawing_leaves_matplotlib_as_it_was(results):
    before = dict(matplotlib.rcParams)
    assert isinstance(figures.draw_rejection(results), Figure)
    assert dict(matplotlib.rcParams) == before
