"""Statistics of each layer against NumPy, on passes in training mode."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import stochbn
from oracles import NormAct, calibrate, small_cnn
from stochbn.statistics.normalization import batch_statistics


class Twice(nn.Module):
    """One BatchNorm called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(input=self.linear(self.norm(x).relu()))


class Plain(nn.BatchNorm1d):
    """A subclass that normalises by itself, without regard for track_running_stats."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.5,
            self.eps,
        )


class PreAct(nn.BatchNorm1d):
    """A subclass that changes its input before the normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu())


class ChannelsLast(nn.BatchNorm1d):
    """A subclass that normalises the last axis of (N, L, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Functional(nn.Module):
    """Uses one layer's tensors by hand, and another layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a
        x = nn.functional.batch_norm(
            x, a.running_mean, a.running_var, weight=a.weight, bias=a.bias, training=a.training, eps=a.eps
        )
        return self.b(x.relu())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6)), (5,)),
    "1d-length": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 2), nn.BatchNorm1d(2)),
        (3, 9),
    ),
    "2d": (small_cnn, (1, 8, 8)),
    "3d": (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3), nn.ReLU(), nn.BatchNorm3d(3)), (1, 4, 4, 4)),
    "sync": (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(small_cnn()), (1, 8, 8)),
    "subclass": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), NormAct(4), nn.Conv2d(4, 3, 3), NormAct(3)), (1, 8, 8)),
    "own-forward": (lambda: nn.Sequential(Plain(5), nn.ReLU(), Plain(5)), (5,)),
    "affine-off": (lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.ReLU(), nn.BatchNorm1d(5)), (5,)),
    "momentum-none": (lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=None), nn.ReLU(), nn.BatchNorm1d(5)), (5,)),
    "pre-activation": (lambda: nn.Sequential(PreAct(5), nn.Linear(5, 5), PreAct(5)), (5,)),
    "channels-last": (lambda: nn.Sequential(ChannelsLast(5), nn.ReLU(), ChannelsLast(5)), (5, 5)),
    "functional": (Functional, (5,)),
    "root": (lambda: nn.BatchNorm1d(5, eps=0.1), (5,)),
    "twice": (Twice, (5,)),
}


# Tolerances of means and of standard deviations. In bfloat16 rounding grows through the layers.
PRECISIONS = {torch.float32: (2e-5, 1e-3), torch.float64: (1e-11, 1e-9), torch.bfloat16: (3e-2, 0.2)}


def trained_statistics(model: nn.Module, batches: list[Tensor]) -> dict[str, np.ndarray]:
    """The oracle: NumPy on what `batch_norm` is given while a copy of the model's BatchNorm layers train."""
    model = copy.deepcopy(model).eval()
    layers = {id(m.running_mean): name for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    found: dict[str, list[np.ndarray]] = {}
    original = nn.functional.batch_norm

    def record(x: Tensor, mean: Tensor, *args: object, **kwargs: object) -> Tensor:
        values = x.double().numpy()
        axes = (0, *range(2, values.ndim))
        eps = model.get_submodule(layers[id(mean)]).eps
        found.setdefault(layers[id(mean)], []).append(np.stack([values.mean(axes), np.log(values.var(axes) + eps)]))
        return original(x, mean, *args, **kwargs)

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "batch_norm", record)
        for batch in batches:
            model(batch)
    return {name: np.stack(values) for name, values in found.items()}  # (B, 2, C)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_fitted_moments_equal_numpys_on_a_training_pass(kind: str, dtype: torch.dtype) -> None:
    build, shape = NETWORKS[kind]
    batches = [torch.randn(12, *shape).to(dtype) + 0.5 for _ in range(6)]
    model = calibrate(build().to(dtype), batches)
    stats = stochbn.fit(model, batches, progress=False)
    oracle = trained_statistics(model, batches)
    assert list(stats.layers) == list(oracle)
    for name, values in oracle.items():
        moments = stats.layers[name].moments
        of_mean, of_std = PRECISIONS[dtype]
        np.testing.assert_allclose(moments.mean, values.mean(0), rtol=of_mean, atol=of_mean)
        np.testing.assert_allclose(moments.variance.sqrt(), values.std(0, ddof=1), rtol=of_std, atol=of_mean)
        assert moments.mean.dtype == torch.float64


def test_under_autocast() -> None:
    batches = [torch.rand(16, 1, 8, 8) for _ in range(6)]
    model = calibrate(small_cnn(), batches)
    plain = stochbn.fit(model, batches, progress=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = stochbn.fit(model, batches, progress=False)
    for name, layer in cast.layers.items():
        assert not torch.equal(layer.moments.mean, plain.layers[name].moments.mean)  # autocast was on
        torch.testing.assert_close(layer.moments.mean, plain.layers[name].moments.mean, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", NETWORKS)
def test_ghost_batches_equal_a_loader_of_that_size_in_fewer_passes(kind: str) -> None:
    build, shape = NETWORKS[kind]
    data = torch.randn(96, *shape)
    model = calibrate(build(), data.split(8))
    passes: list[int] = []
    model.register_forward_hook(lambda _, args, __: passes.append(len(args[0])))
    trial = 2 * [8] if kind in ("2d", "sync", "subclass") else []  # of the layout of convolutions, on one mini-batch
    small = stochbn.fit(model, data.split(8), progress=False)
    assert passes == trial + 12 * [8]
    passes.clear()
    ghost = stochbn.fit(model, data.split(36), batch_size=8, progress=False)  # 8 does not divide 36
    assert passes == [*trial, 32, 40, 24]
    assert ghost.num_batches == small.num_batches == 12
    for name, layer in small.layers.items():
        torch.testing.assert_close(ghost.layers[name].moments.mean, layer.moments.mean, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(ghost.layers[name].moments.deviation, layer.moments.deviation, rtol=1e-3, atol=1e-7)


def test_one_module_called_twice_counts_twice() -> None:
    batches = [torch.randn(12, 5) for _ in range(6)]
    stats = stochbn.fit(calibrate(Twice(), batches), batches, progress=False)
    assert stats.num_batches == 6
    assert stats.layers["norm"].moments.weight == 12


def test_dead_channel_gives_log_eps_and_no_spread() -> None:
    batches = [torch.cat([torch.randn(8, 1), torch.full((8, 1), 3.0)], 1) for _ in range(5)]
    model = calibrate(nn.BatchNorm1d(2, eps=1e-3), batches)
    stats = stochbn.fit(model, batches, progress=False)
    moments = stats.layers[""].moments
    assert moments.mean[:, 1].tolist() == pytest.approx([3.0, math.log(1e-3)])
    assert moments.variance[:, 1].abs().max() < 1e-12
    assert stats.sample(3, seed=0).buffers["running_var"][:, 1].max() < 1e-9


def test_statistics_of_channels_last_and_large_offsets() -> None:
    x = (torch.randn(8, 3, 4, 4) + 1e3).to(memory_format=torch.channels_last)
    mean, log_variance = batch_statistics(x, 0.0, num_batches=2).unbind(1)
    groups = x.double().numpy().reshape(2, 4, 3, 4, 4)
    np.testing.assert_allclose(mean, groups.mean((1, 3, 4)), rtol=1e-6)
    np.testing.assert_allclose(log_variance.exp(), groups.var((1, 3, 4)), rtol=1e-3)


def test_untracked_layers_are_grouped_too() -> None:
    data = torch.randn(96, 4) * 3 + 1
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 4), nn.BatchNorm1d(4))
    for batch in data.split(8) * 20:
        model(batch)
    small, ghost = (
        stochbn.fit(model, data.split(size), batch_size=8, layers=["2"], progress=False) for size in (8, 48)
    )
    torch.testing.assert_close(
        ghost.layers["2"].moments.variance, small.layers["2"].moments.variance, rtol=1e-3, atol=1e-9
    )
    x = torch.randn(5, 4)
    one, many = (stochbn.exact_predict(model, data.split(8), x, num_samples=4, chunk_size=c).probs for c in (1, 5))
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_statistics_name_layer_and_batch(model: nn.Module, batches: list[Tensor], value: float) -> None:
    batches[5][3, 0, 2, 2] = value
    with pytest.raises(ValueError, match="NaN or Inf in layer '1' at mini-batch 5"):
        stochbn.fit(model, batches, progress=False)
    with pytest.raises(ValueError, match="NaN or Inf in layer '1' at mini-batch 5"):
        stochbn.fit(model, [torch.cat(batches)], batch_size=16, progress=False)


def test_one_value_per_channel() -> None:
    class FirstTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[:1])

    with pytest.raises(ValueError, match=r"more than 1 value a channel and mini-batch in layer 'norm', got .*\[1, 3\]"):
        stochbn.fit(FirstTwo(), [torch.randn(4, 3)] * 3, progress=False)


def test_model_that_regroups_its_batch() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[1:])

    with pytest.raises(ValueError, match=r"layer 'norm' to get a multiple of 3 examples, .* got 11"):
        stochbn.fit(Pooled(), [torch.randn(12, 3)] * 3, batch_size=4, progress=False)
