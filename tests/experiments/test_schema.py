import math
from typing import Any, Literal, TypedDict

import pytest

from stochbn.experiments.schema import Count, Index, check
from stochbn.experiments.training.recipes import RECIPES, Recipe


class Entry(TypedDict):
    name: str
    pair: tuple[float, float]


class Header(Entry, total=False):
    seed: Index
    entries: list[Entry]


SOUND: list[tuple[Any, Any]] = [
    ("µ and σ", str),
    (-3, int),
    (1, float),
    (math.nan, float),
    (True, bool),
    (0, Index),
    (1, Count),
    ("adam", Literal["adam", "sgd"]),
    (None, int | None),
    ([], list[int]),
    ([1, 2], tuple[int, ...]),
    ({"a": [1]}, dict[str, list[int]]),
    ({"name": "", "pair": [1, 2.5], "more": object()}, Header),
    (vars(RECIPES["resnet18"]), Recipe),
]
FAULTS: list[tuple[Any, Any, str]] = [
    (1, str, "expected printable text as x, got 1"),
    ("a\nb", str, "expected printable text"),
    ("\ud800", str, "expected printable text"),
    (True, int, "expected a whole number as x, got True"),
    (1.0, int, "expected a whole number"),
    (2**53 + 1, int, "expected a whole number"),
    (10**400, float, r"expected a number as x, got 1000+\.\.\.0+$"),
    ("1", float, "expected a number"),
    (1, bool, "expected true or false"),
    (0, Count, "expected a whole number of at least 1 as x, got 0"),
    (-1, Index, "at least 0"),
    (False, Index, "at least 0"),
    ("rmsprop", Literal["adam", "sgd"], "expected one of adam, sgd"),
    ([], Literal["adam", "sgd"], "expected one of adam, sgd"),
    ("1", int | None, "expected a whole number or null"),
    ({}, list[int], "expected a list as x"),
    ([1, "2"], list[int], r"a whole number as x\[1\], got '2'"),
    ([1], tuple[int, int], "expected 2 values as x"),
    (7, tuple[int, int], "expected 2 values as x"),
    ([], dict[str, int], "expected an object as x"),
    ({"a": {"b": "c"}}, dict[str, dict[str, int]], r"as x\.a\.b, got 'c'"),
    ({"\n": 1}, dict[str, int], "printable text as a key"),
    ([], Header, "expected an object as x"),
    ({"name": ""}, Header, r"expected x\.pair, got none"),
    ({"name": "", "pair": [1, None]}, Header, r"as x\.pair\[1\], got None"),
    ({"name": "", "pair": [1, 2], "entries": [{}]}, Header, r"expected x\.entries\[0\]\.name, got none"),
    (vars(RECIPES["digits"]) | {"epochs": "2"}, Recipe, r"a whole number as x\.epochs"),
    (vars(RECIPES["digits"]) | {"virus": 1}, Recipe, r"known entries only as x, got \['virus'\]"),
    ({"name": "digits"}, Recipe, r"expected x\.batch_size, got none"),
]


@pytest.mark.parametrize(("value", "kind"), SOUND)
def test_sound_values(value: Any, kind: Any) -> None:
    check(value, kind, "x")


@pytest.mark.parametrize(("value", "kind", "message"), FAULTS)
def test_faults_are_named_with_their_place(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}" if message.startswith("expected") else message):
        check(value, kind, "x")
