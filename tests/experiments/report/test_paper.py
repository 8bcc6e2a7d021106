import re
from dataclasses import replace

import numpy as np
import pytest

from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.paper import check_claims, check_reproduction, dominance, set_beside
from stochbn.experiments.report.report import read_files
from stochbn.experiments.report.scores import Score, score


@pytest.mark.parametrize(
    ("key", "value", "verdict"),
    [
        ("nll", 0.0251, "within ±"),
        ("nll", 0.0284, "within ±"),
        ("nll", 0.0286, "0.004 higher"),
        ("nll", 0.0160, "0.009 lower"),
        ("error_percent", 0.58, "within ±"),
        ("error_percent", 0.70, "0.17 higher"),
        ("entropy_out_of_domain", 0.034, "the same"),
        ("entropy_out_of_domain", 0.10, "0.07 higher"),
    ],
)
def test_verdict_beside_the_paper(key, value, verdict):
    assert set_beside("lenet5", {"sbn": {key: Score(value, None, 1)}})["sbn"][key].verdict == verdict


@pytest.mark.parametrize(
    ("experiment", "method", "expected"),
    [
        ("lenet5", "ensemble+sbn", (0.43, 0.014, 0.58)),
        ("vgg11", "sbn", (5.76, 0.302, 0.02)),
        ("vgg11", "ensemble", (5.18, 0.177, 0.22)),
        ("vgg11", "dropout+sbn", (5.38, 0.149, 0.38)),
        ("resnet18", "sbn", (4.35, 0.255, 0.00)),
        ("resnet18", "ensemble+sbn", (3.34, 0.110, 0.27)),
    ],
)
def test_numbers_of_the_paper(experiment, method, expected):
    keys = ("error_percent", "nll", "entropy_out_of_domain")
    found = set_beside(experiment, {method: {key: Score(1.0, None, 1) for key in keys}})
    assert tuple(found[method][key].value for key in keys) == expected


def test_what_the_paper_does_not_have():
    every = {key: {"nll": Score(0.1, None, 1)} for key in METHODS}
    assert list(set_beside("vgg11", every)) == ["sbn", "ensemble", "ensemble+sbn", "dropout", "dropout+sbn"]
    assert list(set_beside("resnet18", every)) == ["sbn", "ensemble", "ensemble+sbn"]
    assert set_beside("digits", every) == {}
    assert set_beside("vgg11", {"plain": {"nll": Score(0.1, None, 1)}}) == {}


def test_dominance():
    left, right = np.array([0.2, 0.4]), np.array([0.1, 0.5])
    assert dominance(left, left, highest=1.0) == 1.0
    assert dominance(left, right, highest=1.0, num_thresholds=9999) == pytest.approx(0.9, abs=1e-3)  # not in [0.1, 0.2)


def test_claims_follow_the_numbers(results):
    found = score(results)
    claims = check_claims(results, found)
    assert len(claims) == 10
    assert [claim.statement.split(":")[0] for claim in claims[:3]] == [
        *("One network", "Deep Ensembles (3 of 6 networks)", "Dropout")
    ]
    assert claims[1].holds == (found["ensemble+sbn"]["nll"].value <= found["ensemble"]["nll"].value)
    pair = ("dropout", "dropout+sbn")
    swapped = {new: replace(results.methods[old], method=METHODS[new]) for old, new in (pair, pair[::-1])}
    reverse = replace(results, methods=results.methods | swapped)
    verdicts, opposite = ([claim.holds for claim in check_claims(r, score(r))] for r in (results, reverse))
    assert verdicts[2] is not opposite[2]  # the NLL of Dropout
    assert verdicts[5] is opposite[5]  # its error is on one level, whichever way
    assert (verdicts[8], opposite[8]) == (True, False)  # its ECDF
    numbers = re.search(r"paired difference ([+-][\d.]+)", claims[1].evidence)
    change = found["ensemble+sbn"]["nll"].value - found["ensemble"]["nll"].value
    assert float(numbers[1]) == pytest.approx(change, abs=5e-5)


def test_claims_with_what_is_there(make_files, tmp_path):
    """One network has neither an ensemble nor dropout to compare with."""
    results = collect(read_files(make_files(tmp_path, num_plain=1, num_dropout=0, size=60, experiment="resnet18"))[0])
    claims = check_claims(results, score(results))
    assert [claim.statement.split(":")[0] for claim in claims] == ["One network"] * 3
    found = check_reproduction("resnet18", score(results), set_beside("resnet18", score(results)))
    assert [claim.statement for claim in found] == [
        *("SBN: error within 1.5 points of Table 1", "SBN: NLL no higher than Table 1, with its ±")
    ]


@pytest.mark.parametrize(
    ("experiment", "error_percent", "nll", "expected"),
    [
        ("lenet5", 0.67, 0.028, [True, True]),
        ("lenet5", 0.70, 0.0291, [False, False]),
        ("vgg11", 7.20, 0.304, [True, True]),
        ("vgg11", 7.30, 0.305, [False, False]),
    ],
)
def test_rows_of_the_paper_are_checked_against_the_limits_of_the_reproduction(experiment, error_percent, nll, expected):
    scores = {"sbn": {"error_percent": Score(error_percent, None, 9), "nll": Score(nll, None, 9)}}
    claims = check_reproduction(experiment, scores, set_beside(experiment, scores))
    assert [claim.holds for claim in claims] == expected
