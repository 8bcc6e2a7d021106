"""Capturing and folding: any batch size, what is refused and why, and that graphs hold on to nothing."""

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, naive
from stochbn.inference.engine import network
from stochbn.inference.engine.captured import CaptureError
from stochbn.inference.engine.graph import capture
from stochbn.statistics.calls import call_on_inputs

pytestmark = pytest.mark.usefixtures("always_captured")

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Views(Base):
    """Computes sizes from its batch, before the draws and after them."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        y = self.norm(self.conv(x)).view(count, 4, -1)
        z = y.reshape(count * 2, 2, -1).relu().view(x.size(0), 4, y.shape[2])
        return self.head(z.mean(2)) + torch.zeros(count, 3)


class Joins(Base):
    """Reads shared values again after the draws: added, multiplied, concatenated, in a list."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = torch.cat([self.norm(h), h], 1)[:, 2:6] + h
        return self.head(torch.stack([y, h.relu()], 1).sum(1).mean((2, 3)) * x.mean((1, 2, 3))[:, None])


class FoldsParts(Base):
    """Has four rows an input in the drawn layer."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unfold(2, 3, 3).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).reshape(-1, 2, 3, 3)
        y = self.norm(self.conv(parts)).mean((2, 3))
        return self.head(y.view(-1, 4, 4).mean(1))


class Constants(Base):
    """Has a tensor that is neither parameter nor buffer, and one that it makes as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.tensor([1.0, 2.0, 0.5, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)) * self.gain.view(-1, 1, 1)
        return self.head(y.relu().mean((2, 3))) * torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def images() -> list[Tensor]:
    return [torch.randn(8, 2, 6, 6) for _ in range(12)]


@pytest.mark.parametrize("kind", [Base, Views, Joins, FoldsParts, Constants])
@pytest.mark.parametrize("conditioned", [False, True])
def test_any_batch_size_after_one_capture(kind: type[Base], conditioned: bool, images: list[Tensor]) -> None:
    model = calibrate(kind(), images)
    stats = stochbn.fit(model, images, conditioned=conditioned, progress=False)
    inputs = torch.cat(images)
    for count in (5, 1, 2, 17):
        pred = stochbn.predict(model, stats, inputs[:count], num_samples=6, seed=1)
        expected = stochbn.predict(model, stats, inputs[:count], num_samples=6, seed=1, chunk_size=1)
        torch.testing.assert_close(pred.samples, expected.samples, **ROUNDING)
        if not conditioned:
            oracle = naive(model, stats.sample(6, seed=1), inputs[:count])
            torch.testing.assert_close(pred.samples, oracle, **ROUNDING)
    (graph,) = network._GRAPHS[model].values()
    assert graph.captured is not None, graph.problem


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Mixes(Base):
    """Subtracts what all inputs have in common, after the draws."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class MixesInShape(Base):
    """Mixes inputs where no shape shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(0)


class Transposes(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).T.contiguous().sigmoid().T


class WritesABuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class Random(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.randn(3)


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean.view(-1, 1, 1)) / self.running_var.view(-1, 1, 1).sqrt()


class NormalisesByHand(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ByHand(4)


REFUSED = {
    Branches: "y.sum\\(\\) > 0|data-dependent",
    Mixes: "`return y - y.mean\\(0\\)` inputs are no longer rows, or are mixed",
    Transposes: "inputs are no longer rows, or are mixed",
    WritesABuffer: "it writes into its inputs or buffers",
    Random: "`return super\\(\\).forward\\(x\\) \\+ 0 \\* torch.randn\\(3\\)` it draws random numbers",
    NormalisesByHand: "layer 'norm' does not normalise by torch's batch_norm",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_such_graph_is_refused_with_its_line(kind: type[Base], images: list[Tensor]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[kind]):
        capture(kind(), call_on_inputs, images[0], ["norm"], dropout=False)


@pytest.mark.parametrize("kind", [Mixes, MixesInShape, Transposes, WritesABuffer, Random])
@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_what_is_refused_is_right_all_the_same(kind: type[Base], images: list[Tensor]) -> None:
    model = calibrate(kind(), images)
    stats = stochbn.fit(model, images, progress=False)
    pred = stochbn.predict(model, stats, images[0], num_samples=6, seed=1)
    torch.testing.assert_close(pred.samples, naive(model, stats.sample(6, seed=1), images[0]), **ROUNDING)
    (graph,) = network._GRAPHS[model].values()
    assert graph.captured is None
    assert graph.problem


def test_hooks_are_run(images: list[Tensor]) -> None:
    model = calibrate(Base(), images)
    stats = stochbn.fit(model, images, progress=False)
    model.conv.register_forward_hook(lambda _, __, output: 2 * output)
    pred = stochbn.predict(model, stats, images[0], num_samples=4, seed=1)
    torch.testing.assert_close(pred.samples, naive(model, stats.sample(4, seed=1), images[0]), **ROUNDING)


def test_weights_are_read_where_they_are(images: list[Tensor]) -> None:
    model = calibrate(Constants(), images)
    stats = stochbn.fit(model, images, progress=False)
    before = stochbn.predict(model, stats, images[0], num_samples=4, seed=1)
    with torch.no_grad():
        model.conv.weight.mul_(2)
        model.norm.bias.add_(1)
    model.head = nn.Linear(4, 3)
    model.gain = torch.ones(4)
    after = stochbn.predict(model, stats, images[0], num_samples=4, seed=1)
    torch.testing.assert_close(after.samples, naive(model, stats.sample(4, seed=1), images[0]), **ROUNDING)
    assert (after.samples - before.samples).abs().max() > 1e-3


def test_a_model_is_freed_also_if_its_call_closes_over_it(images: list[Tensor]) -> None:
    def use() -> list[weakref.ref]:
        model = calibrate(Base(), images)
        stats = stochbn.fit(model, images, progress=False)
        stochbn.predict(model, stats, images[0], num_samples=3, call=lambda _, x: model(x))
        return [weakref.ref(model), weakref.ref(model.conv.weight)]

    gc.collect()
    count = len(network._GRAPHS) + 1
    alive = use()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert len(network._GRAPHS) == count - 1


def test_graphs_of_a_model_are_bounded(images: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MAX_GRAPHS", 2)
    model = calibrate(Base(), images)
    stats = stochbn.fit(model, images, progress=False)
    for side in (6, 7, 8):
        stochbn.predict(model, stats, torch.randn(2, 2, side, side), num_samples=3)
    assert len(network._GRAPHS[model]) == 2


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the path of each batch."""
    taken: list[str] = []
    for path, name in (("captured", "_run_captured"), ("stacked", "_run_stacked")):
        run = getattr(network.Network, name)

        def note(*args: object, path: str = path, run: Callable[..., object] = run, **options: object) -> object:
            taken.append(path)
            return run(*args, **options)

        monkeypatch.setattr(network.Network, name, note)
    return taken


def small_call(model: nn.Module, x: Tensor, num_samples: int) -> int:
    return num_samples * (len(x) * sum(p.numel() for p in model.parameters()) + network.USES_A_VALUE * x.numel())


def test_equal_calls_take_one_path(images: list[Tensor], passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are made, and whatever else was called: so they give equal bits."""
    model = calibrate(Base(), images)
    stats = stochbn.fit(model, images, progress=False)
    monkeypatch.setattr(network, "WORTH_CAPTURING", 2.5 * small_call(model, images[0], 4))
    found = [stochbn.predict(model, stats, images[0], num_samples=4, seed=1).samples for _ in range(4)]
    stochbn.predict(model, stats, images[:3], num_samples=4)  # three batches of that size are worth it
    found += [stochbn.predict(model, stats, images[0], num_samples=4, seed=1).samples for _ in range(2)]
    assert passes == [*4 * ["stacked"], *3 * ["captured"], *2 * ["stacked"]]
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], naive(model, stats.sample(4, seed=1), images[0]), **ROUNDING)


def test_maps_are_kept_for_as_many_inputs_as_there_is_room_for(
    images: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calibrate(Base(), images)
    predictor = stochbn.Predictor(model, stochbn.fit(model, images, progress=False), num_samples=3)
    (prepared,) = predictor._networks
    monkeypatch.setattr(network, "KEPT_NUMBERS", 2 * 3 * 4 * 2)  # of two forms: draws, channels, scale and shift
    made = []
    make = prepared._make_maps
    monkeypatch.setattr(prepared, "_make_maps", lambda *args: made.append(args) or make(*args))
    for sides, expected in (([6, 7, 6, 7], 2), ([8], 3), ([8, 8], 3)):
        for side in sides:
            x = torch.randn(2, 2, side, side)
            torch.testing.assert_close(predictor(x).mean, predictor(x).mean)
        assert len([args for args in made if len(args[1].indices) == 3]) == expected
    assert prepared._kept.num_numbers == 3 * 4 * 2
    monkeypatch.setattr(network, "KEPT_NUMBERS", 3)  # not even all draws of one
    for _ in range(2):
        predictor(torch.randn(2, 2, 9, 9))
    assert prepared._kept.num_numbers == 3 * 4 * 2


FAULTS = """
import resource, torch, stochbn
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 500), nn.BatchNorm1d(500), nn.ReLU(), nn.Linear(500, 10)).eval()
stats = stochbn.fit(model, [torch.randn(16, 8) for _ in range(4)], conditioned=True, progress=False)
predictor, x = stochbn.Predictor(model, stats, num_samples=256, keep_samples=False), torch.randn(16, 8)
for _ in range(5):
    predictor(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    predictor(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that hands memory back")
def test_calls_do_not_ask_the_system_for_memory_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FAULTS], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 500  # 8 MB of activations are 2,048 pages


def test_what_an_interrupted_call_went_on_to_capture_is_not_captured_again(images: list[Tensor]) -> None:
    model = calibrate(Base(), images)
    (prepared,) = stochbn.Predictor(model, stochbn.fit(model, images, progress=False))._networks
    graph = prepared._find_graph(images[0])
    prepared._capture(graph, images[0])
    captured = graph.captured
    assert captured is not None
    prepared._capture(graph, images[0])
    assert graph.captured is captured
