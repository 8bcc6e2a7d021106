"""Rules that keep their promises in simulations, against SciPy and a brute-force search, and what they refuse."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom
from torch import Tensor

import stochbn
from stochbn.decisions import clopper_pearson
from stochbn.inference.prediction import Average

NUM_SETS = 1000
TWO_ERRORS = 2 * math.sqrt(0.05 * 0.95 / NUM_SETS)  # standard errors of a rate of 5 %


def doubtful(doubt: Tensor) -> stochbn.Prediction:
    """Predicts class 0 of two, with 1 − confidence as given, (N,)."""
    average = Average("softmax", keep_samples=False)
    average.add(torch.stack([(1 - doubt).log(), doubt.log()], 1)[None])
    return average.prediction()


def drawn(link: str = "softmax", num: int = 60, draws: int = 4, shape: tuple[int, ...] = (3,)) -> stochbn.Prediction:
    average = Average(link, keep_samples=True)
    average.add(torch.randn(draws, num, *shape))
    return average.prediction()


def right_where_certain() -> tuple[stochbn.Prediction, Tensor]:
    pred = drawn(num=400)
    return pred, (pred.classes + (pred.entropy > pred.entropy.quantile(0.6))) % 3


def simulate(error_rates: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws NUM_SETS sets of `num` inputs that have one of len(error_rates) equally probable scores."""
    doubts = torch.linspace(0.01, 0.49, len(error_rates), dtype=torch.float64)
    places = torch.randint(len(doubts), (NUM_SETS, num))
    wrong = torch.rand(places.shape) < error_rates[places]
    return doubts, doubts[places], wrong.long()


def quietly(make: Callable[[], stochbn.AbstainRule]) -> stochbn.AbstainRule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No threshold|All .* labels")
        return make()


SHARES = torch.linspace(0, 1, 2001)
WORLDS = {
    "certain inputs are right": 0.4 * SHARES**3,
    "many ties": torch.tensor([0.01, 0.02, 0.11, 0.12, 0.3]),
    "unrelated to the errors": torch.full((2001,), 0.101),  # above the risk, whatever is accepted
    "certain inputs are wrong": 0.2 - 0.2 * SHARES**2,
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_risk_is_kept_in_simulated_worlds(world: str) -> None:
    doubts, scores, labels = simulate(WORLDS[world], 200)
    exceeds_bound = exceeds_risk = num_accepting = 0
    for each, truth in zip(scores, labels, strict=True):
        rule = quietly(lambda each=each, truth=truth: stochbn.abstain(doubtful(each), truth, 0.1, by="confidence"))
        if rule.num_accepted:
            # Near-equal, since a softmax of logarithms rounds; no two scores are so near.
            true_risk = WORLDS[world][doubts < rule.threshold - 1e-9].mean()
            exceeds_bound += bool(true_risk > rule.bound)
            exceeds_risk += bool(true_risk > 0.1)
            num_accepting += 1
            assert rule.error <= rule.bound <= 0.1
    assert exceeds_bound / NUM_SETS <= 0.05 + TWO_ERRORS
    assert exceeds_risk / NUM_SETS <= 0.05 + TWO_ERRORS
    if world in ("certain inputs are right", "many ties"):
        assert num_accepting > NUM_SETS / 2, "a promise kept by accepting nothing is no test"


def test_a_search_without_correction_breaks_the_promise() -> None:
    """So the simulations can tell: where errors are unrelated to scores, the best of many bounds is too low."""
    _, scores, labels = simulate(WORLDS["unrelated to the errors"], 200)
    wrong = labels.gather(1, scores.argsort(1)).cumsum(1).numpy()
    kept = np.arange(1, 201)
    found = (binom.cdf(wrong, kept, 0.1) <= 0.05).any(1)
    assert found.mean() > 0.05 + TWO_ERRORS


@pytest.mark.parametrize("values", [2001, 7])
def test_false_alarms_are_as_rare_as_promised(values: int) -> None:
    doubts, scores, _ = simulate(torch.zeros(values), 59)
    rates = []
    for each in scores:
        rule = stochbn.flag(doubtful(each), 0.05, by="confidence")
        rates.append((doubts > rule.threshold + 1e-9).double().mean().item())
    error = 2 * np.std(rates) / math.sqrt(NUM_SETS)
    assert np.mean(rates) <= 0.05 + error
    if values > 59:
        assert np.mean(rates) >= 0.05 - 1 / 60 - error


@given(st.integers(1, 3000), st.floats(0, 1), st.floats(1e-6, 0.5))
def test_clopper_pearson_equals_scipys_beta(inputs: int, share: float, level: float) -> None:
    errors = int(share * inputs)
    expected = beta.ppf(1 - level, errors + 1, inputs - errors) if errors < inputs else 1.0
    assert clopper_pearson(errors, inputs, level) == pytest.approx(expected, rel=1e-8)


def test_clopper_pearson_of_a_million() -> None:
    assert clopper_pearson(5000, 10**6, 1e-3) == pytest.approx(beta.ppf(1 - 1e-3, 5001, 995_000), rel=1e-8)


@pytest.mark.parametrize("digits", [8, 2])
def test_abstain_equals_a_brute_force_search(digits: int) -> None:
    found = set()
    for num in (60, 300, 1000):
        doubt = (0.01 + 0.48 * torch.rand(num, dtype=torch.float64)).round(decimals=digits)
        labels = (torch.rand(num) < 2 * doubt**3).long()
        pred = doubtful(doubt)
        scores, wrong = (1 - pred.confidence).numpy(), labels.numpy()
        tried = 0  # as many as are of use when they share the level
        step = 1 + 0.5 / math.sqrt(0.05 * num)
        while 0.95 ** (num / step**tried) <= 0.05 / (tried + 1):
            tried += 1
        best = (0, 0, 1.0)
        for count in (int(num / step**number) for number in range(tried)):
            inside = scores < np.append(np.sort(scores), np.inf)[count]
            if inside.sum() > 0 and wrong[inside].sum() < inside.sum():
                errors = wrong[inside].sum()
                bound = beta.ppf(1 - 0.05 / tried, errors + 1, inside.sum() - errors)
                if bound <= 0.05 and inside.sum() > best[0]:
                    best = (inside.sum(), errors, bound)
        rule = quietly(lambda pred=pred, labels=labels: stochbn.abstain(pred, labels, 0.05, by="confidence"))
        assert (rule.num_accepted, rule.num_errors) == best[:2]
        assert rule.bound == pytest.approx(best[2])
        assert int(rule(pred).sum()) == rule.num_accepted == round(rule.coverage * num)
        found.add(rule.num_accepted > 0)
    assert True in found


def test_all_are_accepted_when_all_are_right() -> None:
    pred = drawn(num=500)
    rule = stochbn.abstain(pred, pred.classes, risk=0.02)
    assert (rule.threshold, rule.coverage, rule.error) == (math.inf, 1.0, 0.0)
    assert rule.bound <= 0.02
    assert rule(pred).all()


def test_equal_scores_are_accepted_or_refused_together() -> None:
    doubt = torch.tensor([0.1] * 400 + [0.3] * 100, dtype=torch.float64)
    labels = (torch.arange(500) >= 450).long()
    rule = stochbn.abstain(doubtful(doubt), labels, 0.05)
    assert rule.num_accepted == 400
    torch.testing.assert_close(rule(doubtful(doubt)), doubt < 0.2)


def test_the_order_of_inputs_does_not_matter() -> None:
    pred, labels = right_where_certain()
    order = torch.randperm(400)
    assert stochbn.abstain(pred, labels, 0.05) == stochbn.abstain(pred[order], labels[order], 0.05)


@pytest.mark.parametrize("by", ["entropy", "aleatoric", "epistemic", "confidence", "std"])
def test_higher_scores_are_more_uncertain(by: Any) -> None:
    pred = drawn(num=99)
    flagged = stochbn.flag(pred, 0.1, by)(pred)
    assert flagged.sum() == 9  # the tenth would be the new input's place
    value = getattr(pred, by)
    value = -value if by == "confidence" else value.amax(1) if by == "std" else value
    assert value[flagged].min() > value[~flagged].max()


def test_an_input_is_as_uncertain_as_its_most_uncertain_output() -> None:
    for pred, by in (
        (drawn("sigmoid"), "epistemic"),
        (drawn("softmax", shape=(3, 4, 2)), "entropy"),
        (drawn("identity", shape=(1,)), "std"),
        (drawn("identity", shape=()), "std"),
    ):
        value = getattr(pred, by).double().reshape(60, -1).amax(1)
        rule = stochbn.flag(pred, 0.1, by=by)
        assert rule.threshold == value.sort().values[60 - 6]
        torch.testing.assert_close(rule(pred), value > rule.threshold)


@pytest.mark.parametrize(("num", "share", "above"), [(19, 0.05, 1), (99, 0.29, 29), (99, 0.07, 7), (98, 0.05, 4)])
def test_the_quantile_is_counted_in_whole_numbers(num: int, share: float, above: int) -> None:
    pred = drawn(num=num)
    assert stochbn.flag(pred, share).threshold == pred.epistemic.double().sort().values[num - above]


def test_too_few_for_false_alarms() -> None:
    with pytest.raises(ValueError, match=r"at least 19 held-out inputs.*0\.05, got 18: fewer promise nothing.*0\.053"):
        stochbn.flag(drawn(num=18))


def test_too_few_for_a_risk_says_what_they_would_prove() -> None:
    pred = drawn(num=40)
    with pytest.warns(
        UserWarning, match=r"40 inputs without a single error would prove a risk of 0\.072, not 0\.01.*299"
    ):
        rule = stochbn.abstain(pred, pred.classes)
    assert (rule.coverage, rule.bound, rule.threshold) == (0.0, 1.0, -math.inf)
    assert math.isnan(rule.error)
    assert not rule(pred).any()
    enough = drawn(num=299)
    assert stochbn.abstain(enough, enough.classes).coverage == 1
    with pytest.warns(UserWarning, match="298 inputs"):
        stochbn.abstain(enough[1:], enough[1:].classes)


def test_a_risk_that_no_threshold_reaches() -> None:
    pred = drawn(num=600)
    with pytest.warns(
        UserWarning, match=r"No threshold.*risk of 0\.01, so the rule accepts nothing: the lowest error is"
    ):
        rule = stochbn.abstain(pred, (pred.classes + 1) % 3)
    assert not rule(pred).any()


def test_equal_scores_everywhere_leave_all_or_nothing() -> None:
    doubt = torch.full((400,), 0.2, dtype=torch.float64)
    labels = (torch.arange(400) % 20 == 0).long()
    assert stochbn.abstain(doubtful(doubt), labels, 0.1).coverage == 1
    with pytest.warns(UserWarning, match="on 400 of 400 inputs"):
        assert stochbn.abstain(doubtful(doubt), labels, 0.05).coverage == 0


def test_one_class_only() -> None:
    with pytest.warns(UserWarning, match="All 400 labels are 0, and the promise is for such inputs alone"):
        stochbn.abstain(doubtful(torch.full((400,), 0.2)), torch.zeros(400, dtype=torch.long))


def test_bad_input() -> None:
    pred = drawn()
    for labels, message in (
        (torch.arange(60), r"class indices in \[0, 3\), got torch.int64 from 0 to 59"),
        (torch.zeros(59, dtype=torch.long), r"targets of shape \(60,\).*got \(59,\)"),
        (pred.probs[:, 0], "class indices"),
    ):
        with pytest.raises(ValueError, match=message):
            stochbn.abstain(pred, labels)
    with pytest.raises(ValueError, match=r"by to be one of 'entropy', .*'std', got 'variance'"):
        stochbn.flag(pred, by="variance")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected a Prediction, got Tensor\. Pass what stochbn.predict returns"):
        stochbn.flag(pred.probs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"by='std' for raw outputs \(link 'identity'\), got 'epistemic'"):
        stochbn.flag(drawn("identity"))
    with pytest.raises(ValueError, match="several draws for by='epistemic', got 1"):
        stochbn.flag(drawn(draws=1))
    with pytest.raises(ValueError, match="finite values of entropy, got NaN or Inf"):
        stochbn.flag(replace(pred, mean=pred.mean * math.nan), by="entropy")
    for value in (0, 1, -0.1, math.nan):
        with pytest.raises(ValueError, match="risk between 0 and 1, got"):
            stochbn.abstain(pred, pred.classes, value)
        with pytest.raises(ValueError, match="false_alarms between 0 and 1, got"):
            stochbn.flag(pred, value)
    with pytest.raises(ValueError, match=r"confidence between 0\.5 and 1, got 0\.05. Pass 0\.95"):
        stochbn.abstain(pred, pred.classes, confidence=0.05)


@pytest.mark.parametrize(("link", "shape"), [("sigmoid", (3,)), ("softmax", (3, 4)), ("identity", (3,))])
def test_abstain_needs_one_class_for_each_input(link: str, shape: tuple[int, ...]) -> None:
    pred = drawn(link, shape=shape)
    with pytest.raises(ValueError, match=r"one class for each input, probs \(N, K\).*stochbn.flag takes those"):
        stochbn.abstain(pred, torch.zeros(60).long(), by="std")


def test_a_rule_is_for_one_kind_of_prediction() -> None:
    rule = stochbn.flag(drawn())
    with pytest.raises(
        ValueError, match="3 outputs with link 'softmax', as the rule was made from, got 4 with 'softmax'"
    ):
        rule(drawn(shape=(4,)))
    with pytest.raises(ValueError, match="got 3 with 'sigmoid'"):
        rule(drawn("sigmoid"))
    assert rule(drawn()[:0]).shape == (0,)


def rules() -> list[stochbn.AbstainRule | stochbn.FlagRule]:
    pred, labels = right_where_certain()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "400 inputs")
        return [
            stochbn.abstain(pred, labels, 0.05),
            stochbn.abstain(pred, pred.classes, 0.05, by="std"),  # threshold inf
            stochbn.abstain(pred, labels, 0.001),  # −inf
            stochbn.flag(pred, by="confidence"),
        ]


def test_rules_survive_a_file(tmp_path: Path) -> None:
    pred = drawn()
    for rule in rules():
        rule.save(tmp_path / "rule.json")
        again = stochbn.load_rule(tmp_path / "rule.json")
        assert again == rule
        assert torch.equal(again(pred), rule(pred))
        json.loads((tmp_path / "rule.json").read_text(), parse_constant=pytest.fail)  # strict: no Infinity
    assert [path.name for path in tmp_path.iterdir()] == ["rule.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "variance"}, "impossible by 'variance'"),
        ({"link": []}, r"impossible link \[\]"),
        ({"threshold": None}, "impossible threshold None"),
        ({"threshold": math.nan}, "impossible threshold nan"),
        ({"threshold": 10**400}, "too large"),
        ({"risk": 2}, "impossible risk 2"),
        ({"confidence": True}, "impossible confidence True"),
        ({"num_inputs": 400.0}, r"impossible num_inputs 400\.0"),
        ({"num_errors": 399}, "contradict"),
        ({"bound": 0.9}, "contradict"),
        ({"note": 1}, "missing or unknown fields 'note'"),
        ({"format_version": 2}, "format 2 where 1 is known"),
        ({"stochbn": "Rule"}, "unknown kind 'Rule'"),
    ],
)
def test_impossible_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    header = {"stochbn": "AbstainRule", "format_version": 1}
    (tmp_path / "rule.json").write_text(json.dumps(header | asdict(rules()[0]) | change))
    with pytest.raises(ValueError, match=f"file written by rule.save, got .*rule.json: .*{message}.*Save it again"):
        stochbn.load_rule(tmp_path / "rule.json")


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[1]", b"7", b"{}", b"[" * 100_000, b'{"stochbn": {}}', b"9" * 5000]
)
def test_files_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rule.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"Expected a file written by rule\.save"):
        stochbn.load_rule(tmp_path / "rule.json")


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stochbn.load_rule(tmp_path / "rule.json")
