import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats
from sklearn.metrics import roc_auc_score
from torch import nn

import stochbn
from stochbn.assessment import scores
from stochbn.assessment.scores import Estimate, Resampled
from stochbn.inference.prediction import Prediction


@pytest.fixture(scope="module")
def predicted():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(500, 4, generator=generator)
    preds = {"plain": stochbn.predict(nn.Identity(), None, 2 * logits)}
    preds["cooler"] = stochbn.predict(nn.Identity(), None, logits)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    others = {key: stochbn.predict(nn.Identity(), None, 0.7 * pred.probs[:300].log()) for key, pred in preds.items()}
    return preds, labels, others


def test_values_are_those_of_the_library(predicted):
    preds, labels, others = predicted
    found = Resampled(preds, labels, others).values
    for key, pred in preds.items():
        expected = {
            "error_percent": 100 * stochbn.error(pred.probs, labels),
            "nll": stochbn.nll(pred.probs, labels),
            "brier": stochbn.brier(pred.probs, labels),
            "ece_percent": 100 * stochbn.ece(pred.probs, labels),
        }
        for name, value in expected.items():
            assert found[key][name] == pytest.approx(value.item(), abs=1e-4), name
        is_other = np.repeat([0, 1], [500, 300])
        entropies = torch.cat([pred.entropy, others[key].entropy]).double().numpy()
        assert found[key]["auroc"] == pytest.approx(roc_auc_score(is_other, entropies))


def test_intervals_are_as_wide_as_theory_says(predicted):
    """A standard deviation from 500 resamples is known to 1 / √1000, 3 %; of the ends of an interval to about 6 %."""
    preds, labels, others = predicted
    found = Resampled(preds, labels, others)
    estimate = found.estimate("plain")
    each = scores.losses(preds["plain"], labels)
    width = 2 * 1.96 * each.std().item() / 500**0.5
    assert estimate["nll"].high - estimate["nll"].low == pytest.approx(width, rel=0.2)
    known, other = scores.rank(preds["plain"], others["plain"])
    delong = (known.var() / 500 + other.var() / 300).sqrt().item()
    assert estimate["auroc"].high - estimate["auroc"].low == pytest.approx(2 * 1.96 * delong, rel=0.2)
    wrong = int((preds["plain"].classes != labels).sum())
    exact = scipy_stats.binomtest(wrong, 500).proportion_ci(method="wilson")
    assert estimate["error_percent"].low == pytest.approx(100 * exact.low, abs=1e-4)
    change = found.compare("cooler", "plain")["nll"]
    paired = scores.losses(preds["cooler"], labels) - each
    assert change.value == pytest.approx(paired.mean().item())
    assert change.high - change.low == pytest.approx(2 * 1.96 * paired.std().item() / 500**0.5, rel=0.2)
    assert change.excludes_zero


def test_a_method_does_not_differ_from_itself(predicted):
    preds, labels, _ = predicted
    found = Resampled({"plain": preds["plain"], "same": preds["plain"]}, labels).compare("same", "plain")
    assert all(one == Estimate(0, 0, 0) for name, one in found.items() if name != "ece_percent")
    assert not any(one.excludes_zero for one in found.values())


def test_no_error_still_has_an_interval():
    pred = stochbn.predict(nn.Identity(), None, 9 * torch.eye(2).repeat(20, 1))
    estimate = Resampled({"plain": pred}, pred.classes).estimate("plain")["error_percent"]
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high == pytest.approx(100 * scipy_stats.binomtest(0, 40).proportion_ci(method="wilson").high)


def test_pixels_that_repeat_an_image_are_no_evidence(predicted):
    preds, labels, _ = predicted
    pred = stochbn.predict(nn.Identity(), None, preds["plain"].probs.log().unsqueeze(2).expand(-1, -1, 5))
    once = Resampled(preds, labels).estimate("plain")
    often = Resampled({"plain": pred}, labels.unsqueeze(1).expand(-1, 5)).estimate("plain")
    for name, one in once.items():
        expected = pytest.approx((one.value, one.low), abs=1e-3, nan_ok=True)
        assert (often[name].value, often[name].low) == expected, name


def test_an_ece_has_no_interval_and_is_never_a_finding(predicted):
    preds, labels, _ = predicted
    found = Resampled(preds, labels)
    for one in (found.estimate("plain")["ece_percent"], found.compare("cooler", "plain")["ece_percent"]):
        assert math.isnan(one.low)
        assert math.isnan(one.high)
        assert not one.excludes_zero


@pytest.mark.parametrize("swapped", [0, 1])
@pytest.mark.parametrize("flip", [False, True])
def test_full_separation_still_has_an_interval_within_bounds(swapped, flip):
    """As wide as Wilson's of at most 3 / (1/40 + 1/20) trials, 40."""
    sure, unsure = (torch.tensor([[scale, 0.0]]) * torch.linspace(1, 2, 40).unsqueeze(1) for scale in (9, 0.1))
    known, other = (unsure, sure[:20]) if flip else (sure, unsure[:20])
    other = torch.cat([other[swapped:], known[:swapped]])
    preds = {"plain": stochbn.predict(nn.Identity(), None, known)}
    others = {"plain": stochbn.predict(nn.Identity(), None, other)}
    found = Resampled(preds, torch.zeros(40).long(), others).estimate("plain")["auroc"]
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.high - found.low > 0.05
    if not swapped:
        exact = scipy_stats.binomtest(0 if flip else 40, 40).proportion_ci(method="wilson")
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-6)


def test_losses_are_those_of_tune():
    logits = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    labels = (torch.rand(60, 3, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    pred = stochbn.predict(nn.Identity(), None, logits, link="sigmoid")
    expected = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1).double()
    torch.testing.assert_close(scores.losses(pred, labels), expected, atol=1e-5, rtol=1e-4)
    pred = Prediction("identity", 4, logits, logits.abs(), None, None, noise=0.5)
    law = scipy_stats.norm(logits.numpy(), (logits.square() + 0.25).sqrt().numpy())
    np.testing.assert_allclose(scores.losses(pred, labels), -law.logpdf(labels.numpy()).sum(1), rtol=1e-5)
    assert scores.losses(Prediction("identity", 4, logits, logits.abs(), None, None), labels) is None


def test_scores_of_a_regression():
    mean, std = torch.zeros(200, 1), torch.zeros(200, 1)
    labels = torch.randn(200, 1, generator=torch.Generator().manual_seed(3))
    found = Resampled({"plain": Prediction("identity", 2, mean, std, None, None, noise=1.0)}, labels).values["plain"]
    assert found["rmse"] == pytest.approx(labels.square().mean().sqrt().item(), abs=1e-6)
    assert found["coverage_percent"] == pytest.approx(100 * (labels.abs() <= 1.959964).double().mean().item())
    assert set(found) == {"rmse", "coverage_percent", "nll"}
