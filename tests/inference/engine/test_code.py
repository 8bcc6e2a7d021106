"""Compiled passes: equal to eager ones to rounding, and compiled once."""

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import stochbn
from oracles import calibrate

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, within the compiler
]


@pytest.fixture(scope="module")
def images() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(8, 2, 6, 6) for _ in range(10)]


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@pytest.mark.parametrize("dropout", [False, True])
def test_equals_eager_and_is_compiled_once_for_all_batches(images: list[Tensor], dropout: bool) -> None:
    model = calibrate(network(0.5), images)
    stats = stochbn.fit(model, images, dropout=dropout, progress=False)
    loader = [images[0], images[1], images[2][:3]]  # the last is smaller, and 11 draws make an incomplete chunk
    options = {"num_samples": 11, "seed": 4, "dropout": dropout}
    eager = stochbn.predict(model, stats, loader, chunk_size=1, **options)
    counters.clear()
    compiled = stochbn.predict(model, stats, loader, compile=True, **options)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2  # what is shared, and the rest
    torch.testing.assert_close(compiled.samples, eager.samples, rtol=1e-4, atol=1e-6)
    assert compiled.samples.std(0).max() > 1e-3
    again = stochbn.predict(model, stats, loader, compile=True, **options)
    assert torch.equal(again.samples, compiled.samples)
    assert counters["stats"]["unique_graphs"] == graphs
    # The code follows the weights.
    with torch.no_grad():
        model[-1].weight.mul_(3)
        model[1].bias.add_(0.5)
    changed = stochbn.predict(model, stats, loader, compile=True, **options)
    expected = stochbn.predict(model, stats, loader, chunk_size=1, **options)
    torch.testing.assert_close(changed.samples, expected.samples, rtol=1e-4, atol=1e-6)
    assert (changed.samples - compiled.samples).abs().max() > 1e-3
    assert counters["stats"]["unique_graphs"] == graphs


def test_what_cannot_be_traced_says_so(images: list[Tensor]) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y if float(y.sum()) > 0 else -y

    model = calibrate(Branches(), images)
    stats = stochbn.fit(model, images, progress=False)
    with pytest.raises(RuntimeError, match="Expected Branches to compile"):
        stochbn.predict(model, stats, images[0], compile=True)


def test_what_writes_into_its_input_says_so(images: list[Tensor]) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            x.mul_(2)
            return y + x.mean((1, 2, 3)).unsqueeze(1)

    model = calibrate(Writes(), [image.clone() for image in images])
    stats = stochbn.fit(model, images, progress=False)
    with pytest.raises(RuntimeError, match="it writes into its inputs"):
        stochbn.predict(model, stats, images[0], compile=True)


def test_gradients_go_uncompiled(images: list[Tensor]) -> None:
    model = calibrate(network(), images)
    stats = stochbn.fit(model, images, progress=False)
    x = images[0].clone().requires_grad_()
    stochbn.predict(model, stats, x, num_samples=3, compile=True).entropy.sum().backward()
    assert x.grad.abs().max() > 0


def test_what_is_compiled_in_is_told_apart() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.factor = 1.0

        def forward(self, a: Tensor, b: Tensor, k: float = 1.0) -> Tensor:
            return self.norm(a) * k * self.factor + 10 * b

    batches = [{"a": torch.randn(16, 3), "b": torch.randn(16, 3)} for _ in range(5)]
    model = Scales()
    for batch in batches * 30:
        model(**batch)
    stats = stochbn.fit(model, batches, progress=False)
    a, b = batches[0].values()

    def check(inputs: object) -> None:
        options = {"num_samples": 4, "link": "identity"}
        eager = stochbn.predict(model, stats, inputs, **options)
        compiled = stochbn.predict(model, stats, inputs, compile=True, **options)
        torch.testing.assert_close(compiled.samples, eager.samples, rtol=1e-4, atol=1e-5)

    check({"a": a, "b": b, "k": 1.0})
    check({"a": a, "b": b, "k": 5.0})
    check({"b": b, "a": a, "k": 1.0})
    model.factor = 3.0
    check({"a": a, "b": b, "k": 1.0})


def test_a_model_with_randomness_of_its_own_says_so(images: list[Tensor]) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + torch.randn_like(x))

    model = calibrate(Noisy(), images)
    stats = stochbn.fit(model, images, progress=False)
    with pytest.raises(RuntimeError, match=r"randn_like\(x\)\)` it draws random numbers of its own"):
        stochbn.predict(model, stats, images[0], compile=True)


class TwoNames(nn.Module):
    """One BatchNorm layer, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.features = nn.Sequential(self.fc, self.bn)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).relu())


class WritesAfterwards(TwoNames):
    """Changes what the drawn layer has read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        z = self.bn(y)
        return self.head(z + y.relu_())


@pytest.mark.parametrize("kind", [TwoNames, WritesAfterwards])
def test_layers_of_two_names_and_writes_after_them(kind: type[nn.Module]) -> None:
    batches = [torch.randn(8, 4) for _ in range(12)]
    model = calibrate(kind(), batches)
    stats = stochbn.fit(model, batches, progress=False)
    one_by_one = stochbn.predict(model, stats, batches[0], num_samples=5, chunk_size=1)
    compiled = stochbn.predict(model, stats, batches[0], num_samples=5, compile=True)
    torch.testing.assert_close(compiled.samples, one_by_one.samples, rtol=1e-4, atol=1e-6)
    assert compiled.std.max() > 1e-3


def test_within_inference_mode(images: list[Tensor]) -> None:
    model = calibrate(network(), images)
    stats = stochbn.fit(model, images, progress=False)
    expected = stochbn.predict(model, stats, images[0], num_samples=5, chunk_size=1)
    with torch.inference_mode():
        compiled = stochbn.predict(model, stats, images[0], num_samples=5, compile=True)
    torch.testing.assert_close(compiled.samples, expected.samples, rtol=1e-4, atol=1e-6)
