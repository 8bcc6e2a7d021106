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
    assert first.startswith("The network may answer 50 % of inputs alone with an error of 5 % at most; over all it is ")
    every = next(iter(describe(replace(found, rule=replace(rule, num_accepted=112)))))
    assert every.startswith("The network may answer every input alone")
    nothing = next(iter(describe(replace(found, rule=replace(rule, num_accepted=0, num_errors=0)))))
    assert nothing.startswith(
        "No share of inputs is shown to be answered with an error of 5 % at most: it is wrong on "
    )


def test_what_was_chosen_is_weighed_against_the_plain_network(found):
    better = replace(found.methods["last"], differences={"nll": Estimate(-0.02, -0.03, -0.01)}, cost=3.0)
    said = list(describe(replace(found, chosen="last", methods={**found.methods, "last": better})))[1]
    assert "0.0200 lower than the plain network's, at 3 times the plain network's time." in said
    chance = replace(better, differences={"nll": Estimate(0.02, -0.03, 0.05)})
    said = list(describe(replace(found, chosen="last", methods={**found.methods, "last": chance})))[1]
    assert "0.0200 higher than the plain network's, which may be chance" in said
    plain = list(describe(replace(found, chosen="plain")))[1]
    assert plain.endswith("it needs no draws.")


def test_drift_is_named(found):
    calm = replace(found, drift={"train": {"1": (0.1, 0.0)}, "test": {"1": (0.2, 0.1)}})
    assert not any("drift" in one for one in describe(calm))
    moved = replace(found, drift={**calm.drift, "test": {"1": (1.5, 0.0)}})
    assert any(one.startswith("The test data do not look like") for one in describe(moved))


def test_places_are_named(assessed):
    assert next(iter(describe(assessed("segmentation")))).endswith("of the pixels.")
    assert next(iter(describe(assessed("labels")))).endswith("of the labels.")
    assert "95 % intervals hold" in next(iter(describe(assessed("regression"))))
