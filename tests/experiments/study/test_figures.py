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


def test_corruptions_have_a_column_for_each_kind(results: Results) -> None:
    figure = figures.draw_corruptions(results)
    assert [axes.get_title() for axes in figure.axes[:3]] == ["Rotation", "Noise", "Blur"]
    assert [len(axes.lines) for axes in figure.axes] == [8] * 6
    line = figure.axes[1].lines[1]
    assert (line.get_label(), line.get_linestyle()) == ("SBN", "--")
    assert line.get_ydata()[2] == results.methods["sbn"].plain.corruptions["noise 3"]["nll"]


def test_tuning_has_a_curve_for_each_family(results: Results) -> None:
    axes = figures.draw_tuning(results).axes[0]
    assert [line.get_label() for line in axes.lines] == [
        *("Tuned SBN", "Real mini-batches, conditioned, tuned", "Last layer, tuned")
    ]
    assert all(len(line.get_xdata()) >= 7 for line in axes.lines)


def test_draws_are_beside_the_ensemble(results: Results) -> None:
    figure = figures.draw_draws(results)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Real mini-batches, conditioned, tuned", "Last layer, tuned", "Deep Ensembles (3)"]
    assert "draws" not in figures.draw_figures(replace(results, first_draws={}))
