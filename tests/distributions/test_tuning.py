"""What was chosen, as a table, a curve and a record."""

import math

import pytest

from stochbn.distributions.tuning import Score, Tuning

SCORES = (
    Score(None, 1.0, 0.5, 0.1, 0.04),
    Score(None, 2.0, 0.45, 0.05, 0.03),
    Score(0.5, 1.0, 0.42, 0.02, 0.05),
    Score(1.0, 1.0, 0.4, 0.0, 0.0),
    Score(1.0, 2.0, 0.35, -0.05, 0.01),
)


def test_printing() -> None:
    tuning = Tuning(1.0, 2.0, SCORES, verdict=("Draws won.", "The network is overconfident."))
    assert str(tuning) == (
        "spread  temperature     NLL  difference to the fitted spread\n"
        " plain            1  0.5000  +0.1000 ± 0.0400\n"
        " plain            2  0.4500  +0.0500 ± 0.0300\n"
        "   0.5            1  0.4200  +0.0200 ± 0.0500\n"
        "     1            1  0.4000  reference\n"
        "     1            2  0.3500  -0.0500 ± 0.0100   chosen\n"
        "Draws won.\n"
        "The network is overconfident."
    )
    assert repr(tuning) == "Tuning(spread=1.0, temperature=2.0, noise=None)"
    assert str(Tuning(2.0)) == repr(Tuning(2.0))


def test_printing_regression_layers_and_old_scores() -> None:
    spread = {"a": 1.0, "b": 0.5}
    tuning = Tuning(spread, 1.0, (Score(1.0, 1.0, 0.4), Score(spread, 1.0, 0.4, -0.1, 0.2, noise=0.25)), noise=0.25)
    head, old, new = str(tuning).splitlines()
    assert head.split()[:3] == ["spread", "noise", "NLL"]
    assert old.split() == ["1", "1", "0.4000"]  # of a file of 0.1.0
    assert new.split() == ["1,", "0.5", "0.25", "0.4000", "-0.1000", "±", "0.2000", "chosen"]
    assert "difference to the plain network" in str(Tuning(None, 2.0, SCORES[:2]))


def test_the_curve_has_each_spread_at_its_best() -> None:
    assert Tuning(1.0, 2.0, SCORES).curve == ((0.5, 1.0, 0.42), (1.0, 2.0, 0.35))
    assert Tuning().curve == ()
    assert Tuning(1.0, 2.0, SCORES).to_dict()["curve"] == ((0.5, 1.0, 0.42), (1.0, 2.0, 0.35))


def test_what_cannot_be() -> None:
    for noise in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="a finite noise above 0"):
            Tuning(noise=noise)
    with pytest.raises(ValueError, match="a temperature above 0"):
        Tuning(None, 0.0)
