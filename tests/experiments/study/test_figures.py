from dataclasses import replace

import pytest

from stochbn.experiments.methods import METHODS
from stochbn.experiments.study import figures
from stochbn.experiments.study.results import Results


def test_every_method_has_a_mark(results: Results) -> None:
    figure = figures.draw_methods(results)
    assert len(figure.axes) == 3
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [METHODS[key].label for key in reversed(results.methods)]
    marks = [container.lines[0].get_xdata() for container in figure.axes[0].containers]
    for mark, kind in zip(marks, ("plain", "tempered"), strict=True):
        values = [getattr(row, kind).scores["nll"].value for row in results.methods.values()]
        assert list(reversed(mark)) == pytest.approx(values)


def test_the_line_of_the_ensemble_is_named_and_better_has_a_direction(results: Results) -> None:
    figure = figures.draw_methods(results)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("Deep Ensembles, as they are", "as it is", "with temperature")
    ]
    assert [axes.get_xlabel().split("\n")[1] for axes in figure.axes] == ["← better", "← better", "better →"]


def test_corruptions_have_a_column_for_each_kind_and_a_colour_for_each_method(results: Results) -> None:
    figure = figures.draw_corruptions(results)
    assert [axes.get_title() for axes in figure.axes[:3]] == ["Rotation", "Noise", "Blur"]
    for axes in figure.axes:
        assert len({line.get_color() for line in axes.lines}) == len(axes.lines) == 6
    line = figure.axes[1].lines[2]
    assert line.get_label() == "Last layer, tuned"
    ours, one = (results.methods[key].plain.corruptions["noise 3"]["nll"] for key in ("last-tuned", "plain"))
    assert line.get_ydata()[2] == pytest.approx(ours - one)
    assert (figure.axes[0].lines[0].get_ydata() == 0).all(), "one network is what the others are compared with"


def test_tuning_has_a_curve_for_each_family(results: Results) -> None:
    axes = figures.draw_tuning(results).axes[0]
    assert [line.get_label() for line in axes.lines] == [
        *("Tuned SBN", "Real mini-batches, conditioned, tuned", "Last layer, tuned")
    ]
    assert all(len(line.get_xdata()) >= 7 for line in axes.lines)
    minima, (low, high) = [min(line.get_ydata()) for line in axes.lines], axes.get_ylim()
    assert low < min(minima) <= max(minima) < high
    assert {"0.5", "1", "2", "4"} <= {text.get_text() for text in axes.get_xticklabels()}


def test_draws_are_beside_the_ensemble(results: Results) -> None:
    figure = figures.draw_draws(results)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == ["Deep Ensembles (3)", "Last layer, tuned", "Last layer, tuned with T", "SBN"]
    for axes in figure.axes:
        assert len(axes.collections) == 3, "a band of ± for each"
        assert len(axes.get_xticklabels()) >= 2
    assert "draws" not in figures.draw_figures(replace(results, first_draws={}))
