from dataclasses import replace

import pytest

from stochbn.assessment.scores import Estimate
from stochbn.assessment.verdict import describe


@pytest.fixture
def found(assessed):
    return assessed("classes")


def test_the_first_sentence_is_what_it_may_do_alone(found):
    rule = replace(found.rule, num_inputs=112, num_accepted=56, num_errors=1, risk=0.05)
    first = next(iter(describe(replace(found, rule=rule))))
    label = found.methods[found.chosen].label
    assert first.startswith(
        f"With 95 % confidence, “{label}” makes at most 5 % errors on the inputs it accepts, which were 50 % of the "
        "test inputs. Over all it is wrong on "
    )
    every = next(iter(describe(replace(found, rule=replace(rule, num_accepted=112)))))
    assert "which were all of the test inputs." in every
    nothing = next(iter(describe(replace(found, rule=replace(rule, num_accepted=0, num_errors=0)))))
    assert nothing.startswith("No threshold could be shown to keep the error below 5 %. Over all it is wrong on ")


def test_what_was_chosen_is_weighed_against_the_plain_network(found):
    better = replace(found.methods["last"], differences={"nll": Estimate(-0.02, -0.03, -0.01)}, cost=3.0)
    said = list(describe(replace(found, chosen="last", methods={**found.methods, "last": better})))[1]
    assert "0.0200 lower than the plain network's, at 3 times the plain network's time." in said
    chance = replace(better, differences={"nll": Estimate(0.02, -0.03, 0.05)})
    said = list(describe(replace(found, chosen="last", methods={**found.methods, "last": chance})))[1]
    assert "0.0200 higher than the plain network's, which may be chance" in said
    plain = list(describe(replace(found, chosen="plain")))[1]
    assert plain.endswith("on known inputs draws do not improve it.")
    few = list(describe(replace(found, chosen="plain", num_mistakes=3)))[1]
    assert few.startswith("The plain network stands: it makes 3 mistakes on the validation data, and fewer than 10")


def test_a_network_that_is_surer_of_strange_inputs_is_said_to_be(found):
    warning = "surer of them than of known inputs"
    for high, expected in ((0.6, False), (0.4, True)):
        method = found.methods[found.chosen]
        method = replace(method, scores={**method.scores, "auroc": Estimate(0.3, 0.2, high)})
        said = describe(replace(found, methods={**found.methods, found.chosen: method}))
        assert any(warning in one for one in said) == expected


def test_a_calibration_error_is_no_finding(found):
    assert not any("calibration" in one for one in describe(found))


def test_drift_is_named(found):
    calm = replace(found, drift={"train": {"1": (0.1, 0.0)}, "test": {"1": (0.2, 0.1)}})
    assert not any("drift" in one for one in describe(calm))
    moved = replace(found, drift={**calm.drift, "test": {"1": (1.5, 0.0)}})
    assert any(one.startswith("The test data do not look like") for one in describe(moved))


def test_places_are_named(assessed):
    assert next(iter(describe(assessed("segmentation")))).endswith("of the pixels.")
    assert next(iter(describe(assessed("labels")))).endswith("of the labels.")
    assert "95 % intervals hold" in next(iter(describe(assessed("regression"))))
