import re

import pytest

from stochbn.experiments.methods import METHODS, SPREADS, Method


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.key)
def test_the_table_is_sound(method: Method) -> None:
    assert METHODS[method.key] is method
    assert re.fullmatch(r"[a-z+-]+", method.key)  # a prefix of tensor names, and part of file names
    assert re.fullmatch(r"#[0-9a-f]{6}", method.colour)
    assert (method.members is not None) == (method.group == "ensemble")
    assert method.drawing.dropout == (method.group == "dropout")
    assert method.drawing.family is not None or method.drawing == type(method.drawing)(dropout=method.drawing.dropout)
    assert method.drawing.family == "empirical" or not (method.drawing.exhaustive or method.drawing.apart)


def test_labels_and_lines_are_distinct() -> None:
    assert len({method.label for method in METHODS.values()}) == len(METHODS)


def test_a_fixed_spread_has_a_key_of_its_own() -> None:
    keys = [METHODS["last"].at(spread).key for spread in SPREADS]
    assert keys == ["last@0.50", "last@0.71", "last@1.00", "last@1.41", "last@2.00", "last@2.83"]
    wide = METHODS["last-tuned"].at(2.0)
    assert (wide.drawing.spread, wide.drawing.tuned) == (2.0, False)
    assert wide.label == "Last layer, tuned, spread 2.00"
