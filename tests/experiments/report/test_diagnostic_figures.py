import pytest
from scipy.integrate import trapezoid

from stochbn.experiments.report import diagnostic_figures


def test_batch_statistics_have_a_panel_for_each_channel(diagnostics):
    figure = diagnostic_figures.draw_statistics(diagnostics, "conv1.norm")
    assert len(figure.axes) == 6
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 1, 2, 2, 1]  # a dead channel is a mark, not a density
    distances = diagnostics.tensors["statistics/conv1.norm/ks"]
    assert figure.axes[1].get_title() == f"channel 9, KS {distances[0, 9]:.3f}"
    assert "constant" in figure.axes[2].get_title()
    for axes in (figure.axes[0], figure.axes[3]):
        for line in axes.lines:  # densities: they cover nearly all of the probability
            assert trapezoid(line.get_ydata(), line.get_xdata()) == pytest.approx(1, abs=0.15)


def test_one_dot_for_each_channel_that_varies(diagnostics):
    axes = diagnostic_figures.draw_distances(diagnostics).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [19] * 4
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv1", "fc"]


def test_other_diagnostic_figures(diagnostics):
    header = diagnostics.header
    effect = diagnostic_figures.draw_effect(header["by_samples"], "num_samples")
    assert [len(axes.lines) for axes in effect.axes] == [1, 2, 1]
    shown = [axes for axes in diagnostic_figures.draw_gallery(diagnostics).axes if axes.images]
    assert len(shown) == 32
    assert shown[1].texts[0].get_text() == "0 → 1\n0.18"
    assert all(spine.get_visible() for axes in shown for spine in axes.spines.values()), "white letters need a frame"
