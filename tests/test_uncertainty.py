"""Pure functions against NumPy, SciPy, scikit-learn and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import log_loss, roc_curve
from torch import Tensor

import stochbn


def random_samples(draws: int = 5, inputs: int = 40, classes: int = 4, sharpness: float = 3.0) -> Tensor:
    return (sharpness * torch.randn(draws, inputs, classes, dtype=torch.float64)).softmax(2)


def test_entropies_equal_scipys() -> None:
    samples = random_samples()
    np.testing.assert_allclose(stochbn.entropy(samples.mean(0)), scipy_entropy(samples.mean(0).numpy(), axis=1))
    expected = scipy_entropy(samples.numpy(), axis=2).mean(0)
    np.testing.assert_allclose(stochbn.expected_entropy(samples), expected)
    information = scipy_entropy(samples.mean(0).numpy(), axis=1) - expected
    np.testing.assert_allclose(stochbn.mutual_information(samples), information, atol=1e-12)


@given(st.lists(st.floats(-700, 700), min_size=24, max_size=24))
def test_mutual_information_is_never_negative(logits: list[float]) -> None:
    samples = torch.tensor(logits).view(2, 3, 4).softmax(2)
    assert stochbn.mutual_information(samples).min() >= 0
    assert stochbn.mutual_information(samples).max() <= math.log(2) + 1e-5  # at most log S
    assert stochbn.mutual_information(samples[:1]).max() < 1e-6


def test_scores_equal_independent_ones() -> None:
    probs = random_samples().mean(0)
    targets = torch.randint(4, (40,))
    truth = np.eye(4)[targets.numpy()]
    assert stochbn.nll(probs, targets).item() == pytest.approx(log_loss(targets, probs.numpy(), labels=range(4)))
    assert stochbn.error(probs, targets).item() == np.mean(probs.numpy().argmax(1) != targets.numpy())
    assert stochbn.brier(probs, targets).item() == pytest.approx(((probs.numpy() - truth) ** 2).sum(1).mean())


def naive_ece(probs: np.ndarray, targets: np.ndarray, num_bins: int) -> float:
    total = 0.0
    confidence, predicted = probs.max(1), probs.argmax(1)
    for b in range(num_bins):
        low, high = b / num_bins, (b + 1) / num_bins
        inside = [i for i in range(len(probs)) if low < confidence[i] <= high]
        if inside:
            accuracy = np.mean([predicted[i] == targets[i] for i in inside])
            total += len(inside) / len(probs) * abs(accuracy - np.mean([confidence[i] for i in inside]))
    return total


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_ece_equals_a_plain_loop(num_bins: int) -> None:
    probs = random_samples(1, 300)[0]
    targets = torch.randint(4, (300,))
    assert stochbn.ece(probs, targets, num_bins).item() == pytest.approx(
        naive_ece(probs.numpy(), targets.numpy(), num_bins)
    )


def test_ece_needs_a_bin() -> None:
    with pytest.raises(ValueError, match="num_bins of at least 1, got 0"):
        stochbn.ece(torch.ones(1, 2), torch.zeros(1).long(), 0)


def test_ece_of_certain_and_right_is_0_and_certain_and_wrong_is_1() -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert stochbn.ece(probs, torch.tensor([0, 0])) == 0
    assert stochbn.ece(probs, torch.tensor([1, 1])) == 1


def test_nll_of_an_underflowed_probability_is_finite() -> None:
    assert 80 < stochbn.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() < 100


def test_trailing_shape() -> None:
    probs = torch.randn(6, 4, 3, 2).softmax(1)
    targets = torch.randint(4, (6, 3, 2))
    flat, flat_targets = probs.permute(0, 2, 3, 1).reshape(-1, 4), targets.reshape(-1)
    uncertainty = stochbn.entropy(probs)
    torch.testing.assert_close(
        stochbn.aurc(probs, targets, uncertainty), stochbn.aurc(flat, flat_targets, uncertainty.flatten())
    )
    for score in (stochbn.nll, stochbn.error, stochbn.brier, stochbn.ece):
        torch.testing.assert_close(score(probs, targets), score(flat, flat_targets))
    assert stochbn.entropy(probs).shape == (6, 3, 2)


@pytest.mark.parametrize("score", [stochbn.nll, stochbn.error, stochbn.brier, stochbn.ece])
def test_bad_targets(score: object) -> None:
    probs = torch.full((3, 2), 0.5)
    for targets, message in (
        (torch.zeros(2, dtype=torch.long), r"targets of shape \(3,\) for probs of shape \(3, 2\), got \(2,\)"),
        (torch.zeros(3), "class indices"),
        (torch.tensor([0, 1, 2]), r"in \[0, 2\), got torch.int64 from 0 to 2"),
        (torch.tensor([0, 1, -1]), "from -1 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            score(probs, targets)  # type: ignore[operator]
    with pytest.raises(ValueError, match="empty"):
        score(torch.ones(0, 2), torch.ones(0, dtype=torch.long))  # type: ignore[operator]


@pytest.mark.parametrize("digits", [1, 8])
def test_aurc_equals_the_mean_over_random_orders(digits: int) -> None:
    probs, targets = random_samples(1, 30)[0], torch.randint(4, (30,))
    uncertainty = stochbn.entropy(probs).round(decimals=digits)  # with ties, and without
    wrong = (probs.argmax(1) != targets).numpy()
    random = np.random.default_rng(0)
    areas = []
    for _ in range(2000):
        order = np.lexsort((random.random(30), uncertainty.numpy()))  # by uncertainty, then at random
        areas.append(np.mean(np.cumsum(wrong[order]) / np.arange(1, 31)))
    tolerance = 3 * np.std(areas) / math.sqrt(len(areas)) + 1e-12
    assert stochbn.aurc(probs, targets, uncertainty).item() == pytest.approx(np.mean(areas), abs=tolerance)


def test_aurc_of_no_information_is_the_error() -> None:
    probs, targets = random_samples(1)[0], torch.randint(4, (40,))
    assert stochbn.aurc(probs, targets, torch.zeros(40)).item() == pytest.approx(stochbn.error(probs, targets).item())
    with pytest.raises(ValueError, match=r"one uncertainty for each target, \(40,\), got \(39,\)"):
        stochbn.aurc(probs, targets, torch.zeros(39))


@pytest.mark.parametrize("num", [1, 19, 20, 21, 60, 333])
def test_fpr95_equals_that_of_the_roc_curve(num: int) -> None:
    known, other = torch.randn(50).double().round(decimals=1), (1 + torch.randn(num).double()).round(decimals=1)
    truth = np.r_[np.zeros(50), np.ones(num)]
    false, true, _ = roc_curve(truth, np.r_[known, other], drop_intermediate=False)
    assert stochbn.fpr95(known, other).item() == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)])


def test_fpr95_needs_inputs_on_both_sides() -> None:
    for known, other in ((torch.ones(0), torch.ones(2)), (torch.ones(2), torch.tensor([math.nan]))):
        with pytest.raises(ValueError, match="finite uncertainties of shape"):
            stochbn.fpr95(known, other)
