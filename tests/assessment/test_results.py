import json
import math
from dataclasses import replace

import stochbn


def test_numbers_are_json_and_all_there(assessed):
    found = assessed("classes")
    numbers = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert numbers["chosen"] == found.chosen
    assert numbers["methods"]["plain"]["scores"]["nll"]["value"] == found.methods["plain"].scores["nll"].value
    assert numbers["rule"]["risk"] == 0.4
    assert numbers["versions"]["stochbn"] == stochbn.__version__
    assert set(numbers["drift"]) == {"train", "test", "out-of-domain"}
    nothing = replace(found, rule=replace(found.rule, threshold=-math.inf))
    assert nothing.to_dict()["rule"]["threshold"] == "-inf"


def test_printed_it_is_the_verdict_and_a_table(assessed):
    found = assessed("regression")
    text = str(replace(found, warned=("of something",)))
    assert text.startswith(found.verdict[0])
    assert "Warning: of something" in text
    assert [line.split("  ")[0] for line in text.splitlines()[-6:]] == [one.label for one in found.methods.values()]
    assert text.splitlines()[-6].count("—") == 3, "a regression without noise has no NLL, and one pass no spread"
