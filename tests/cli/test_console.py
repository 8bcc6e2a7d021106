import json
import math
from pathlib import Path

import pytest

from stochbn.cli.console import console, say, tell


def test_text_is_printed_as_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    say("Wrote [bold]/a/path/that/is/longer/than/a/line")
    assert capsys.readouterr().out == "Wrote [bold]/a/path/that/is/longer/than/a/line\n"


def test_a_summary_is_json_in_place_of_text(capsys, monkeypatch):
    tell({"out": Path("a.csv")})
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(console, "quiet", True)
    say("Wrote a.csv")
    tell({"out": Path("a.csv"), "scores": [1.5, math.nan, {"bound": math.inf}], 3: "<ü>"})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail) == {
        "out": "a.csv",
        "scores": [1.5, None, {"bound": None}],
        "3": "<ü>",
    }
