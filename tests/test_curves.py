"""Points of curves against naive loops, SciPy and the scores that they belong to."""

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import stochbn
from stochbn import curves
from stochbn.inference.prediction import Prediction


@pytest.fixture(scope="module")
def scored():
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(400, 5, generator=generator)).softmax(1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def regression(count=400, outputs=1, noise=0.5):
    mean = torch.randn(count, outputs, generator=torch.Generator().manual_seed(1))
    std = torch.rand(count, outputs, generator=torch.Generator().manual_seed(2))
    return Prediction("identity", 8, mean, std, None, None, noise=noise)


def test_wilson_is_scipys():
    for hits, count in ((0, 7), (3, 7), (7, 7), (990, 1000)):
        low, high = curves.wilson(torch.tensor(hits / count, dtype=torch.float64), torch.tensor(count))
        expected = scipy_stats.binomtest(hits, count).proportion_ci(method="wilson")
        assert (low.item(), high.item()) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_bins_are_those_of_the_calibration_error(scored):
    probs, labels = scored
    found = curves.bin_confidence(probs, labels)
    assert found.count.sum() == 400
    gaps = (found.observed - found.predicted).abs().nan_to_num()
    assert (gaps * found.count / 400).sum().item() == pytest.approx(stochbn.ece(probs, labels).item(), abs=1e-6)
    confidence, correct = probs.max(1).values, probs.argmax(1) == labels
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        assert found.count[number] == inside.sum()
        if inside.any():
            expected = scipy_stats.binomtest(int(correct[inside].sum()), int(inside.sum())).proportion_ci(
                method="wilson"
            )
            got = found.low[number].item(), found.high[number].item()
            assert got == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_copies_of_an_input_do_not_narrow_its_interval(scored):
    """Pixels that all repeat their image are no more evidence than the image."""
    probs, labels = scored
    once = curves.bin_confidence(probs, labels)
    often = curves.bin_confidence(probs.unsqueeze(2).expand(-1, -1, 9), labels.unsqueeze(1).expand(-1, 9))
    torch.testing.assert_close(often.count, 9 * once.count)
    for name in ("predicted", "observed", "low", "high"):
        torch.testing.assert_close(getattr(often, name), getattr(once, name), equal_nan=True)


def test_labels_and_pixels_have_a_confidence_each():
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(3))
    labels = (torch.rand(30, 4, generator=torch.Generator().manual_seed(4)) < logits.sigmoid()).long()
    pred = stochbn.predict(torch.nn.Identity(), None, logits, link="sigmoid")
    confidence, correct = curves.outcomes(pred, labels)
    torch.testing.assert_close(confidence, torch.maximum(logits.sigmoid(), 1 - logits.sigmoid()))
    assert torch.equal(correct, (logits > 0) == labels.bool())
    assert curves.bin_confidence(pred, labels).count.sum() == 120


def test_intervals_of_a_regression_hold_what_they_say():
    pred = regression(20_000)
    labels = pred.mean + pred.total_std * torch.randn(20_000, 1, generator=torch.Generator().manual_seed(5))
    found = curves.cover(pred, labels[:, 0])  # of one output, labels may be (N,)
    assert ((found.low < found.predicted) & (found.predicted < found.high)).sum() >= 12  # of 15 at 95 %
    inside = ((labels - pred.mean).abs() <= scipy_stats.norm.ppf((1 + 5 / 15) / 2) * pred.total_std).double().mean()
    assert found.observed[4].item() == pytest.approx(inside.item())
    with pytest.raises(AttributeError, match="Expected a noise level"):
        curves.cover(regression(20_000, noise=None), labels)


def test_risks_are_those_that_aurc_averages(scored):
    probs, labels = scored
    coverage, risk = curves.risks(probs, labels)
    assert coverage[[0, -1]].tolist() == pytest.approx([1 / 400, 1])
    assert risk.mean().item() == pytest.approx(stochbn.aurc(probs, labels, stochbn.entropy(probs)).item(), abs=1e-6)
    order = stochbn.entropy(probs).argsort()
    wrong = (probs.argmax(1) != labels)[order].double()
    assert risk[99].item() == pytest.approx(wrong[:100].mean().item())
    pred = stochbn.predict(torch.nn.Identity(), None, probs.log())
    _, by_confidence = curves.risks(pred, labels, "confidence")
    confident = (probs.argmax(1) != labels)[probs.max(1).values.argsort(descending=True)][:100]
    assert by_confidence[99].item() == pytest.approx(confident.double().mean().item())


def test_the_risk_of_a_regression_is_its_error():
    pred = regression()
    labels = pred.mean + pred.std
    _, risk = curves.risks(pred, labels)
    assert risk[-1].item() == pytest.approx(pred.std.square().mean().sqrt().item(), abs=1e-6)
    assert (risk.diff() >= 0).all(), "the labels are off by just the standard deviation"


def test_an_input_has_one_uncertainty():
    probs = torch.rand(6, 3, 4, 4).softmax(1)
    pred = stochbn.predict(torch.nn.Identity(), None, probs.log())
    torch.testing.assert_close(curves.uncertainties(pred), stochbn.entropy(probs).mean((1, 2)).double())
    torch.testing.assert_close(curves.uncertainties(regression(5)), regression(5).std[:, 0].double())


def test_the_density_is_scipys():
    values, points = np.random.default_rng(0).gamma(3, size=200), np.linspace(0, 9, 50)
    found = curves.density(torch.from_numpy(values), torch.from_numpy(points))
    np.testing.assert_allclose(found, scipy_stats.gaussian_kde(values)(points), rtol=1e-9)
