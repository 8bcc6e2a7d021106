"""Both paths against a naive loop, on models that make folding and sharing hard; from threads, and interrupted."""

import copy
import json
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import stochbn
from oracles import calibrate, naive
from stochbn.inference.prediction import Average

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}

pytestmark = pytest.mark.usefixtures("path")  # each test on both


@pytest.fixture(autouse=True)
def no_warnings():
    """None of these models may fall back to the loop: that would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def images() -> list[Tensor]:
    return [torch.rand(8, 3, 8, 8) for _ in range(12)]


def fitted(model: nn.Module, batches: list[Tensor], **options: object) -> stochbn.Factorized:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that some of these models do not use
        return stochbn.fit(calibrate(model, batches), batches, progress=False, **options)


def check(model: nn.Module, images: list[Tensor], num_samples: int = 9, **options: object) -> None:
    """Compares predictions, in chunks of several sizes, with the naive loop's."""
    stats = fitted(model, images, **options)
    expected = naive(model, stats.sample(num_samples, seed=1), images[0])
    assert expected.std(0).max() > 1e-3  # else nothing is drawn
    for chunk_size in (None, 2, 4, 9):
        pred = stochbn.predict(model, stats, images[0], num_samples=num_samples, seed=1, chunk_size=chunk_size)
        torch.testing.assert_close(pred.samples, expected, **ROUNDING)


class Net(nn.Module):
    """A convolution, a BatchNorm, another convolution and a head; subclasses change what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def flops(model: nn.Module, stats: stochbn.Factorized, x: Tensor, **options: object) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        stochbn.predict(model, stats, x, **options)
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def test_what_precedes_the_first_draw_is_computed_once(images: list[Tensor], path: str) -> None:
    if path == "stacked":
        pytest.skip("without a graph nothing is shared")
    model = Net()
    every, last = fitted(model, images), fitted(model, images, layers=["norm2"])
    first_conv = 2 * 8 * 64 * 3 * 9 * 6  # rows, places, channels in, kernel, channels out
    second_conv = 2 * 8 * 64 * 6 * 9 * 6
    for chunk_size in (4, 12):
        options = {"num_samples": 12, "chunk_size": chunk_size}
        for stats in (every, last):
            stochbn.predict(model, stats, images[0], **options)  # captures
        assert flops(model, every, images[0], **options)["aten.convolution"] == first_conv + 12 * second_conv
        assert flops(model, last, images[0], **options)["aten.convolution"] == first_conv + second_conv


class Residual(Net):
    """What is shared is read again late, and in a list."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        first, *others = h.unbind(1)
        y = self.norm1(h) + first.unsqueeze(1)
        y = self.norm2(self.conv2(torch.stack([y, h]).sum(0)))
        return self.head(torch.cat([y + sum(others).unsqueeze(1), x.mean(1, keepdim=True) * h], 2).mean((2, 3)))


class WritesIntoShared(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        y = self.norm1(h)
        h.mul_(2)
        return self.head((y + h).mean((2, 3)))


class WritesIntoInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5)
        y = self.norm1(self.conv1(x))
        x.mul_(3)
        return self.head((y + x.mean(1, keepdim=True)).mean((2, 3)))


class WritesBeforeTheDraw(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        h[:, 0] = 0
        h = F.relu(h, inplace=True)
        return self.head((self.norm1(h) * h).mean((2, 3)))


class Iterates(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = [row * (1 + i) for i, row in enumerate(iter(x))]
        values, _ = self.conv1(torch.stack(rows)).max(1, keepdim=True)
        return self.head(F.relu(self.norm1(self.conv1(x) + values)).mean((2, 3)))


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        if h.mean() > -100 and h.shape[0] == x.size(0):
            h = h * h.std().item()
        return self.head(F.relu(self.norm1(h)).mean((2, 3)))


class NeedsContiguity(Net):
    """A view that only a contiguous tensor allows: it cannot run channels-last."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.head(x.view(x.shape[0], 6, 64).mean(2))


class Strides(Net):
    """Reads memory as it lies, which channels-last would change without an error."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        h = h.as_strided((h.shape[0], 6, 8, 4), (384, 64, 8, 2))
        return self.head(self.norm1(h).mean((2, 3)))


class Remembers(Net):
    """Computes a part only once, and keeps it where nobody looks: the second pass is shorter than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "stem" not in self.memory:
            h = self.conv1(x)
            assert h.dim() == 4
            self.memory["stem"] = h
        stem = self.memory["stem"] if not self.training else self.conv1(x)
        y = self.norm2(self.conv2(self.norm1(self.conv2(stem))))
        return self.head((y + stem).mean((2, 3)))


class TurnsGradientsOff(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.norm1(self.conv1(x)) + 5 * x.mean(1, keepdim=True)
        return self.head((h + self.conv1(x)).mean((2, 3)))


class WritesBehindTheCounter(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        y = self.norm1(h)
        h.data.add_(1)
        return self.head((y * h).mean((2, 3)))


class Resizes(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x).detach().clone().resize_(x.shape[0], 6, 4, 16)
        return self.head(self.norm1(h)[..., :8].mean((2, 3)))


class ScalesItsWeight(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, 1 + self.weight, self.bias, eps=self.eps)


class ByHand(nn.BatchNorm2d):
    """Normalises by hand in eval mode: only swapped buffers reach it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return (x - self.running_mean.view(1, -1, 1, 1)) / (self.running_var.view(1, -1, 1, 1) + 0.5).sqrt()


@pytest.mark.parametrize(
    "kind",
    [
        Net,
        Residual,
        WritesIntoShared,
        WritesIntoInput,
        WritesBeforeTheDraw,
        WritesBehindTheCounter,
        Iterates,
        Branches,
        NeedsContiguity,
        TurnsGradientsOff,
    ],
)
def test_equals_the_naive_loop(kind: type[nn.Module], images: list[Tensor]) -> None:
    check(kind(), images)


@pytest.mark.parametrize("kind", [Strides, Resizes])
def test_memory_layout_is_not_changed_under_a_model_that_reads_it(kind: type[nn.Module], images: list[Tensor]) -> None:
    model = kind()
    stats = fitted(model, images)
    with torch.no_grad():
        h = model.conv1(torch.cat(images))
        h = h.as_strided((96, 6, 8, 4), (384, 64, 8, 2)) if kind is Strides else h.clone().resize_(96, 6, 4, 16)
    means = h.unflatten(0, (12, 8)).mean((1, 3, 4))  # of each of 12 mini-batches
    torch.testing.assert_close(stats.layers["norm1"].moments.mean[0], means.mean(0).double(), rtol=1e-4, atol=1e-6)
    expected = naive(model, stats.sample(6, seed=1), images[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be computed one by one
        pred = stochbn.predict(model, stats, images[0], num_samples=6, seed=1)
    torch.testing.assert_close(pred.samples, expected, **ROUNDING)


def test_a_model_that_remembers_is_not_shared(images: list[Tensor]) -> None:
    model = Remembers()
    stats = fitted(model, images)
    model.memory.clear()
    expected = naive(model, stats.sample(8, seed=1), images[0])
    model.memory.clear()
    pred = stochbn.predict(model, stats, images[0], num_samples=8, seed=1, chunk_size=2)
    torch.testing.assert_close(pred.samples, expected, **ROUNDING)


def test_gradients_stop_where_the_model_stops_them(images: list[Tensor]) -> None:
    model = TurnsGradientsOff()
    stats = fitted(model, images)
    gradients = []
    for chunk_size in (1, 3, None):
        x = images[0].clone().requires_grad_()
        stochbn.predict(model, stats, x, num_samples=7, chunk_size=chunk_size).entropy.sum().backward()
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-7)


def test_layers_with_parameters_of_their_own_way(images: list[Tensor]) -> None:
    model = Net()
    model.norm1 = ScalesItsWeight(6)
    check(model, images)


def test_layers_that_normalise_by_hand_get_drawn_buffers(images: list[Tensor]) -> None:
    model = calibrate(Net(), images)
    stats = stochbn.fit(model, images, progress=False)
    hand = ByHand(6)
    hand.load_state_dict(model.norm1.state_dict())
    model.norm1 = hand
    expected = naive(model, stats.sample(6, seed=1), images[0])
    pred = stochbn.predict(model, stats, images[0], num_samples=6, seed=1)
    torch.testing.assert_close(pred.samples, expected, **ROUNDING)


def test_a_model_whose_passes_differ_is_not_shared(images: list[Tensor]) -> None:
    class Alternates(Net):
        count = 0
        stride = 1

        def forward(self, x: Tensor) -> Tensor:
            self.count += self.stride
            h = self.conv1(x)
            h = torch.abs(h) if self.count % 2 else torch.square(h)
            return self.head(self.norm1(h).mean((2, 3)))

    model = Alternates()
    stats = fitted(model, images)
    pred = stochbn.predict(model, stats, images[0], num_samples=8, chunk_size=2)
    assert pred.samples.isfinite().all()
    model.stride = 0  # from here on every pass is of one kind
    kinds = []
    for model.count in (0, 1):
        kinds.append(naive(model, stats.sample(8, seed=0), images[0]))
    distances = torch.stack([(pred.samples - kind).abs().amax((1, 2)) for kind in kinds])
    assert distances.amin(0).max() < 1e-5  # each draw is wholly of the one or of the other
    assert distances.amax(0).min() > 1e-4


def test_channels_last_models_and_layers_without_affine_parameters(images: list[Tensor]) -> None:
    model = Net()
    model.norm1 = nn.BatchNorm2d(6, affine=False)
    check(model.to(memory_format=torch.channels_last), images)


def test_gradients_equal_the_loops(images: list[Tensor]) -> None:
    model = Net()
    stats = fitted(model, images)
    gradients = []
    for chunk_size in (None, 3, 1):
        x = images[0].clone().requires_grad_()
        model.zero_grad()
        stochbn.predict(model, stats, x, num_samples=7, chunk_size=chunk_size).entropy.sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    for others in gradients[:2]:
        for gradient, expected in zip(others, gradients[2], strict=True):
            assert expected.abs().max() > 0
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_the_model_keeps_its_weights_and_their_layout(images: list[Tensor]) -> None:
    model = Net()
    stats = fitted(model, images)
    before = {name: (value, value.clone(), value.stride()) for name, value in model.state_dict(keep_vars=True).items()}
    stochbn.predict(model, stats, images[0])
    for name, value in model.state_dict(keep_vars=True).items():
        same, content, stride = before[name]
        assert value is same
        assert torch.equal(value, content)
        assert value.stride() == stride


def test_chunks_are_bounded_in_bytes(images: list[Tensor], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    model = Net()
    stats = fitted(model, images)
    whole = stochbn.predict(model, stats, images[0][:1], num_samples=12)
    sizes = []
    add = Average.add
    monkeypatch.setattr(
        Average, "add", lambda self, outputs, *args: (sizes.append(len(outputs)), add(self, outputs, *args))
    )
    a_draw = 4 * 6 * 64  # bytes of the largest activation
    for name, value in {"CHUNK_ROWS": 2, "CHUNK_BYTES": 5 * a_draw, "STACKED_BYTES": 5 * a_draw}.items():
        monkeypatch.setattr(f"stochbn.inference.engine.network.{name}", value)
    monkeypatch.setattr("stochbn.inference.predict.BLOCK_VALUES", 1)  # each chunk is averaged by itself
    again = stochbn.predict(model, stats, images[0][:1], num_samples=12)
    # Stacked, the largest activation is not known, and is guessed to be larger.
    assert sizes == ([4, 4, 4] if path == "captured" else [1] * 12)
    torch.testing.assert_close(again.samples, whole.samples, **ROUNDING)


def test_networks_that_were_just_drawn_are_not_drawn_again(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    sample = type(stats).sample

    def counting(self: stochbn.Factorized, *args: object, **kwargs: object) -> stochbn.Draws:
        made.append(kwargs["seed"])
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(type(stats), "sample", counting)
    first = stochbn.predict(model, stats, x, seed=0)
    second = stochbn.predict(model, stats, x, seed=0)
    other = stochbn.predict(model, stats, x, seed=1)
    assert made == [0, 1]
    assert torch.equal(first.probs, second.probs)
    assert not torch.equal(first.probs, other.probs)


@pytest.fixture
def serving(images: list[Tensor]) -> tuple[nn.Module, stochbn.Factorized]:
    model = Net()
    return model, fitted(model, images)


def test_threads_get_what_they_would_get_alone(
    serving: tuple[nn.Module, stochbn.Factorized], images: list[Tensor]
) -> None:
    """Eight predict single inputs; one fits, one calls the model, one trains another, one draws random numbers."""
    model, stats = serving
    inputs = torch.cat(images)[:25]
    expected = [stochbn.predict(model, stats, x[None], num_samples=6).samples for x in inputs]
    plain = copy.deepcopy(model).eval()(images[0]).detach()
    center = stats.layers["norm1"].moments.mean
    model.eval()
    done = threading.Event()

    def predict(_: int) -> bool:
        return all(
            torch.equal(stochbn.predict(model, stats, x[None], num_samples=6).samples, samples)
            for x, samples in zip(inputs, expected, strict=True)
        )

    def until_done(check: Callable[[], bool]) -> bool:
        results = [check()]
        while not done.wait(0.01):
            results.append(check())
        return all(results)

    def train() -> bool:
        other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        other(torch.ones(4, 3)).sum().backward()
        return other.training and other[0].weight.grad is not None

    numbers: list[tuple[float, ...]] = []
    others: list[Callable[[], bool]] = [
        lambda: torch.equal(stochbn.fit(model, images, progress=False).layers["norm1"].moments.mean, center),
        lambda: torch.equal(model(images[0]), plain) and not any(m.training for m in model.modules()),
        train,
        lambda: numbers.append(tuple(torch.rand(4).tolist())) is None,
    ]
    with ThreadPoolExecutor(12) as pool:
        beside = [pool.submit(until_done, check) for check in others]
        try:
            assert list(pool.map(predict, range(8))) == [True] * 8
        finally:
            done.set()
        assert [future.result() for future in beside] == [True] * 4
    assert len(set(numbers)) == len(numbers)  # the generator of the process is never set back


def test_the_model_is_never_changed_not_even_during_a_call(
    serving: tuple[nn.Module, stochbn.Factorized], images: list[Tensor]
) -> None:
    model, stats = serving
    model.train()
    seen: list[bool] = []

    def look() -> dict[str, object]:
        return {
            "tensors": [id(t) for t in (*model.parameters(), *model.buffers())],
            "modes": [m.training for m in model.modules()],
            "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            "attributes": [sorted(vars(m)) for m in model.modules()],
        }

    before = look()

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(look() == before)
            return func(*args, **(kwargs or {}))

    with Watching():
        stochbn.predict(model, stats, images[0], num_samples=3)
        stochbn.fit(model, images[:3], progress=False)
        stochbn.exact_predict(model, images, images[0], num_samples=2)
    assert len(seen) > 20
    assert all(seen)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that interrupt")
def test_interrupts_leave_nothing_behind(path: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("interrupted.py")), path]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] == []
    assert found["interrupted"] > 100
