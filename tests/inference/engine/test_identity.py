"""Whatever is built into a graph and changes later is noticed: a graph that was captured before is not used then."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate
from stochbn.inference.engine import network

pytestmark = pytest.mark.usefixtures("always_captured")


class Net(nn.Module):
    """Depends on all kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.number, self.pair, self.table = 1.0, (1.0, 1.0), {"a": [1.0]}
        self.array, self.config = np.ones(3, dtype=np.float32), SimpleNamespace(scale=1.0)
        self.activation: Callable[[Tensor], Tensor] = torch.relu
        self.tensor = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.bn(self.fc(x)))
        scale = self.number * self.pair[0] * self.table["a"][0] * self.config.scale
        return self.head(h) * scale * torch.from_numpy(self.array) * self.tensor


CHANGES: dict[str, Callable[[Net], object]] = {
    "number": lambda model: setattr(model, "number", 3.0),
    "tuple": lambda model: setattr(model, "pair", (3.0, 1.0)),
    "nested": lambda model: model.table["a"].__setitem__(0, 3.0),
    "array": lambda model: model.array.__imul__(3),
    "object": lambda model: setattr(model.config, "scale", 3.0),
    "function": lambda model: setattr(model, "activation", torch.tanh),
    "tensor": lambda model: setattr(model, "tensor", torch.full((3,), 3.0)),
    "tensor in place": lambda model: model.tensor.mul_(3),
    "hook": lambda model: model.head.register_forward_hook(lambda *args: 3 * args[-1]),
    "forward": lambda model: setattr(model, "forward", lambda x: 3 * Net.forward(model, x)),
    "module": lambda model: setattr(model, "head", nn.Linear(8, 3)),
    "weights": lambda model: model.head.weight.data.mul_(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change: str, vectors: list[Tensor]) -> None:
    model = calibrate(Net(), vectors)
    stats = stochbn.fit(model, vectors, progress=False)
    before = stochbn.predict(model, stats, vectors[0], num_samples=4)
    assert [graph.problem for graph in network._GRAPHS[model].values()] == [""]
    CHANGES[change](model)
    after = stochbn.predict(model, stats, vectors[0], num_samples=4)
    expected = stochbn.predict(model, stats, vectors[0], num_samples=4, chunk_size=1)
    torch.testing.assert_close(after.samples, expected.samples, rtol=1e-4, atol=1e-6)
    assert (after.samples - before.samples).abs().max() > 1e-3


def test_what_a_call_closes_over_is_noticed_and_its_code_is_captured_once(vectors: list[Tensor]) -> None:
    model = calibrate(Net(), vectors)
    stats = stochbn.fit(model, vectors, progress=False)
    scales = [1.0]
    for scale, captures in ((1.0, 1), (1.0, 1), (3.0, 2)):
        scales[0] = scale
        options = {"num_samples": 4, "call": lambda model, x: model(x) * scales[0]}
        found = stochbn.predict(model, stats, vectors[0], **options)
        expected = stochbn.predict(model, stats, vectors[0], chunk_size=1, **options)
        torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-6)
        assert len(network._GRAPHS[model]) == captures


class Hides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](super().forward(x))


def test_hidden_modules_and_file_names_are_not_captured_but_right(vectors: list[Tensor]) -> None:
    model = calibrate(Hides(), vectors)
    stats = stochbn.fit(model, vectors, progress=False)
    stochbn.predict(model, stats, vectors[0], num_samples=4)
    with torch.no_grad():
        model.hidden[0].weight.mul_(3)
    found = stochbn.predict(model, stats, vectors[0], num_samples=4)
    expected = stochbn.predict(model, stats, vectors[0], num_samples=4, chunk_size=1)
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-6)
    model = calibrate(Net(), vectors)
    items = [{"x": batch, "name": [f"{number}-{row}" for row in range(8)]} for number, batch in enumerate(vectors)]
    found = stochbn.predict(model, stats, items, num_samples=4, call=lambda model, item: model(item["x"]))
    expected = stochbn.predict(model, stats, vectors, num_samples=4)
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-6)
    assert len(network._GRAPHS[model]) == 1  # of the vectors without names
