"""Graphs that would be wrong for other inputs, draws or batch sizes than the first are refused at the first."""

import threading
import time

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate

pytestmark = pytest.mark.usefixtures("always_captured")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.fc(x)).relu())


class MixesBesideMaskedLogits(Net):
    def forward(self, x: Tensor) -> Tensor:
        o = self.head(self.bn(self.fc(x)).softmax(0) * 5)
        return torch.cat([o, torch.full_like(o[:, :1], -1e9)], 1)


class MixesUnlessZero(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.fc(x)).softmax(0) * 5) * (x.abs().sum(1, keepdim=True) > 0)


class OtherwiseAlone(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.fc(x)).relu()
        return self.head(3 * h if x.shape[0] == 1 else h)


class ReadsAgainAfterDropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.bn(self.fc(x)))
        return self.drop(h).relu() + h - 1e9 * torch.tensor([0.0, 0.0, 1.0])


class AddsItsSize(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.shape[0]


class MixesBefore(Net):
    """Rows depend on each other before the draws begin."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


KINDS = [
    *(MixesBesideMaskedLogits, MixesUnlessZero, OtherwiseAlone, ReadsAgainAfterDropout, AddsItsSize, MixesBefore),
]


@pytest.mark.parametrize("kind", KINDS)
def test_right_whatever_comes_first(kind: type[Net], vectors: list[Tensor]) -> None:
    model = calibrate(kind(), vectors)
    stats = stochbn.fit(model, vectors, layers=["bn"], progress=False)
    predictor = stochbn.Predictor(model, stats, num_samples=12)
    if kind is not MixesBefore:  # which has no answer for one input
        predictor.warm_up(torch.zeros(1, 6))
    stochbn.predict(model, stats, vectors[0], num_samples=1)
    for rows in (8, 2, 1) if kind is not MixesBefore else (8, 2):
        expected = stochbn.predict(model, stats, vectors[1][:rows], num_samples=12, chunk_size=1)
        for found in (predictor(vectors[1][:rows]), stochbn.predict(model, stats, vectors[1][:rows], num_samples=12)):
            torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-6)


class Nested(Net):
    """Asks another network in its forward pass."""

    def __init__(self, other: list[stochbn.Predictor]) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(one(torch.zeros(2, 6)).probs.mean() for one in self.other)


def test_predictions_within_a_forward_pass(vectors: list[Tensor]) -> None:
    inner = calibrate(Net(), vectors)
    predictor = stochbn.Predictor(inner, stochbn.fit(inner, vectors, progress=False), num_samples=3)
    outer = calibrate(Nested([]), vectors)
    stats = stochbn.fit(outer, vectors, progress=False)
    outer.other.append(predictor)
    found: list[stochbn.Prediction] = []
    thread = threading.Thread(
        target=lambda: found.append(stochbn.predict(outer, stats, vectors[0], num_samples=3)), daemon=True
    )
    thread.start()
    thread.join(60)
    expected = stochbn.predict(outer, stats, vectors[0], num_samples=3, chunk_size=1)
    torch.testing.assert_close(found[0].probs, expected.probs, rtol=1e-4, atol=1e-6)


class Slow(Net):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.5)
        return super().forward(x)


def test_a_capture_keeps_no_other_model_waiting(vectors: list[Tensor]) -> None:
    quick, slow = calibrate(Net(), vectors), Slow()
    slow.load_state_dict(quick.state_dict())
    stats = stochbn.fit(quick, vectors, progress=False)
    predictor = stochbn.Predictor(quick, stats, num_samples=3).warm_up(vectors[0])
    thread = threading.Thread(target=lambda: stochbn.predict(slow, stats, vectors[0], num_samples=3))
    thread.start()
    finished = 0
    while thread.is_alive():
        predictor(vectors[0])
        finished += 1
    assert finished > 20  # in some seconds; a lock would have let one or two through


def test_weights_are_kept_once_for_all_shapes() -> None:
    vectors = [torch.rand(8, 1, 6, 6) for _ in range(6)]
    model = calibrate(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), vectors
    )
    predictor = stochbn.Predictor(model, stochbn.fit(model, vectors, progress=False), num_samples=5)
    for side in range(6, 12):
        predictor(torch.rand(4, 1, side, side))
    assert len(predictor._networks[0]._kept.tensors) == 1
