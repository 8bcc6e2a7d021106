import numpy as np
import pytest
import torch

from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.differences import Interval, compare
from stochbn.experiments.report.scores import Output, Scored, measure

SIZE = 1000


@pytest.fixture(scope="module")
def labels():
    return torch.randint(3, (SIZE,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def methods(labels):
    """One sharp network, one less so, and three as sharp as the first."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for key, sharpness, count in (("a", 2.0, 1), ("b", 1.0, 1), ("c", 2.0, 3), ("d", 2.0, 2)):
        outputs = []
        for _ in range(count):
            logits = torch.randn(SIZE, 3, generator=generator, dtype=torch.float64)
            logits[torch.arange(SIZE), labels] += sharpness
            outputs.append({"test": Output(logits.softmax(1)), "out-of-domain": Output(logits[:500].sigmoid() / 3)})
        found[key] = Scored(METHODS["plain"], tuple(range(count)), tuple(outputs), tuple(outputs))
    return found


def test_intervals_of_differences(methods, labels):
    """Of the NLL against the normal approximation; of a method and itself, nothing."""
    ab, cc, ca = compare(methods, labels, [("a", "b"), ("c", "c"), ("c", "a")])
    assert (ab.first, ab.second) == ("a", "b")
    losses = [-methods[key].outputs[0]["test"].probs[torch.arange(SIZE), labels].log() for key in "ab"]
    difference = losses[0] - losses[1]
    width = 1.96 * difference.std().item() / SIZE**0.5
    nll = ab.scores["nll"]
    assert nll.difference == pytest.approx(difference.mean().item())
    # A percentile of 500 resamples is off by about 6 % of the width.
    assert nll.low == pytest.approx(difference.mean().item() - width, abs=0.2 * width)
    assert nll.high == pytest.approx(difference.mean().item() + width, abs=0.2 * width)
    assert nll.excludes_zero
    assert all(found == Interval(0, 0, 0) for found in cc.scores.values())
    assert not cc.scores["nll"].excludes_zero
    assert ca.scores["nll"].low < 0 < ca.scores["nll"].high
    assert not ca.scores["nll"].excludes_zero


def test_scores_are_those_of_the_tables(methods, labels):
    (found,) = compare(methods, labels, [("c", "b")], num_resamples=2)
    ours, theirs = ([measure(output, labels) for output in methods[key].outputs] for key in "cb")
    assert found.scores.keys() == {
        *("error_percent", "nll", "ece", "brier", "auroc_entropy", "aupr_entropy", "fpr95_entropy")
    }
    for key, interval in found.scores.items():
        expected = np.mean([one[key] for one in ours]) - np.mean([one[key] for one in theirs])
        assert interval.difference == pytest.approx(expected, abs=1e-12), key


def test_a_resample_is_scored_as_if_its_inputs_were_there(methods, labels):
    """One resample, by hand: the interval is mirrored around the difference."""
    (found,) = compare(methods, labels, [("a", "b")], num_resamples=1)
    generator = np.random.default_rng(0)
    rows = {
        part: torch.from_numpy(generator.integers(n, size=n)) for part, n in (("test", SIZE), ("out-of-domain", 500))
    }
    ours, theirs = (
        measure(
            {part: Output(methods[key].outputs[0][part].probs[index]) for part, index in rows.items()},
            labels[rows["test"]],
        )
        for key in "ab"
    )
    for key, interval in found.scores.items():
        varied = 2 * interval.difference - interval.low
        assert varied == pytest.approx(ours[key] - theirs[key], abs=1e-9), key


def test_without_out_of_domain_data_there_is_no_detection(methods, labels):
    known = {
        key: Scored(METHODS["plain"], (0,), ({"test": methods[key].outputs[0]["test"]},), ()) for key in ("a", "b")
    }
    (found,) = compare(known, labels, [("a", "b")], num_resamples=2)
    assert found.scores.keys() == {"error_percent", "nll", "ece", "brier"}


def test_methods_on_other_networks_are_refused(methods, labels):
    with pytest.raises(ValueError, match="methods with the same networks"):
        compare(methods, labels, [("c", "d")])
    assert compare(methods, labels, []) == []


def test_the_same_every_time(methods, labels):
    again = compare(methods, labels, [("a", "b")], num_resamples=20)
    assert again == compare(methods, labels, [("a", "b")], num_resamples=20)
