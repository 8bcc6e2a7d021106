"""Averages of draws, and the uncertainties that follow from them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import stochbn
from oracles import centred
from stochbn.inference.prediction import Average


@given(
    st.integers(1, 6),
    st.integers(2, 5),
    st.lists(st.floats(-60, 60), min_size=90, max_size=90),
    st.sampled_from(["softmax", "sigmoid"]),
)
def test_entropy_is_aleatoric_plus_epistemic(draws: int, classes: int, logits: list[float], link: str) -> None:
    outputs = torch.tensor(logits)[: draws * 3 * classes].view(draws, 3, classes)
    average = Average(link, keep_samples=True)
    for part in outputs.split(2):
        average.add(part)
    pred = average.prediction()
    assert pred.epistemic.min() >= 0
    torch.testing.assert_close(pred.entropy, pred.aleatoric + pred.epistemic, rtol=1e-5, atol=1e-6)
    limit = math.log(classes) if link == "softmax" else math.log(2)
    assert pred.entropy.min() >= 0
    assert pred.entropy.max() <= limit + 1e-5
    assert pred.aleatoric.min() >= 0


def test_near_equal_draws_have_no_negative_uncertainty() -> None:
    logits = torch.randn(200, 4) * 3
    average = Average("softmax", keep_samples=True)
    average.add(logits + 1e-6 * torch.randn(4, 200, 4))
    pred = average.prediction()
    raw = pred.entropy - pred.aleatoric
    assert raw.min() < 0  # rounding makes the difference negative somewhere
    assert pred.epistemic.min() == 0
    assert stochbn.mutual_information(pred.samples).min() >= 0


def test_gradients_are_finite_where_probabilities_underflow() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight.mul_(1000)
    x = torch.randn(16, 4, requires_grad=True)
    pred = stochbn.predict(model, centred(model).sample(5, spread=0.01, seed=0), x)
    assert (pred.probs == 0).any()
    (pred.entropy + pred.epistemic + pred.std.sum(1)).sum().backward()
    assert x.grad.isfinite().all()


def test_masked_classes_may_be_minus_infinity() -> None:
    average = Average("softmax", keep_samples=False)
    average.add(torch.tensor([[[0.0, 1.0, -math.inf]]]))
    assert average.prediction().probs[0, 2] == 0


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_softmax_needs_classes(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Flatten(0) if len(shape) == 1 else nn.Identity())
    with pytest.raises(ValueError, match=r"K ≥ 2 classes for link='softmax'.*link='sigmoid'"):
        stochbn.predict(model, centred(model), torch.randn(5, 1), num_samples=3)


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
@pytest.mark.parametrize("keep_samples", [True, False])
def test_some_inputs_of_a_prediction_are_what_they_are_alone(link: str, keep_samples: bool) -> None:
    outputs = torch.randn(4, 6, 3, 2)

    def predict(rows: slice | Tensor) -> stochbn.Prediction:
        average = Average(link, keep_samples)
        average.add(outputs[:, rows])
        return replace(average.prediction(), counts=torch.arange(6)[rows])

    whole = predict(slice(None))
    for rows in (torch.tensor([5, 0]), torch.tensor([True, False] * 3), slice(1, 4)):
        found, alone = whole[rows], predict(rows)
        assert (found.link, found.num_samples, len(found)) == (link, 4, len(alone))
        for name in ("mean", "std", "samples", "expected_entropy", "counts"):
            torch.testing.assert_close(getattr(found, name), getattr(alone, name))
    assert len(whole[torch.zeros(6) > 0]) == 0


@pytest.mark.parametrize("rows", [3, torch.tensor(3), torch.ones(2, 2) > 0, [0, 1], (0, 1)])
def test_inputs_are_selected_along_their_axis(rows: object) -> None:
    average = Average("softmax", keep_samples=False)
    average.add(torch.randn(1, 4, 3))
    with pytest.raises(TypeError, match=r"a mask \(N,\), a tensor of indices or a slice.*pred\[3:4\]"):
        average.prediction()[rows]  # type: ignore[index]


def test_classes_and_their_confidence() -> None:
    average = Average("softmax", keep_samples=False)
    average.add(torch.randn(3, 5, 4, 2))
    pred = average.prediction()
    assert torch.equal(pred.classes, pred.probs.argmax(1))
    assert torch.equal(pred.confidence, pred.probs.max(1).values)
    average = Average("sigmoid", keep_samples=False)
    average.add(torch.tensor([[[2.0, -2.0, 0.0]]]))
    pred = average.prediction()
    assert pred.classes.tolist() == [[1, 0, 0]]
    torch.testing.assert_close(pred.confidence, torch.tensor([[2.0, 2.0, 0.0]]).sigmoid())
    average = Average("identity", keep_samples=False)
    average.add(torch.randn(2, 5, 1))
    for name in ("classes", "confidence"):
        with pytest.raises(AttributeError, match=f"'softmax' or 'sigmoid' for {name}, got 'identity'"):
            getattr(average.prediction(), name)
