"""Batch statistics against NumPy on a pass in train mode, for every kind of layer; and the model's integrity."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import stochbn
from conftest import NormAct, calibrate, small_cnn
from stochbn.statistics.normalization import batch_moments, evaluating, find_layers


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
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    small = stochbn.fit(model, data.split(8), progress=False)
    assert len(passes) == 12
    ghost = stochbn.fit(model, data.split(36), batch_size=8, progress=False)  # 8 does not divide 36
    assert len(passes) == 12 + 3
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


def test_batch_moments_of_channels_last_and_large_offsets() -> None:
    x = (torch.randn(8, 3, 4, 4) + 1e3).to(memory_format=torch.channels_last)
    mean, variance = batch_moments(x, groups=2)
    groups = x.double().numpy().reshape(2, 4, 3, 4, 4)
    np.testing.assert_allclose(mean, groups.mean((1, 3, 4)), rtol=1e-6)
    np.testing.assert_allclose(variance, groups.var((1, 3, 4)), rtol=1e-3)


# ---- the model afterwards


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "tensors": [id(t) for t in (*model.parameters(), *model.buffers())],
        "modes": [m.training for m in model.modules()],
        "momenta": [getattr(m, "momentum", None) for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }


def assert_unchanged(model: nn.Module, before: dict[str, object]) -> None:
    after = snapshot(model)
    for key in ("state", "rng"):
        torch.testing.assert_close(after.pop(key), before.pop(key), rtol=0, atol=0)
    assert after == before


class Trap:
    """A loader that shuffles by torch's generator and fails halfway."""

    def __init__(self, batches: list[Tensor], error: BaseException | None) -> None:
        self.batches, self.error = batches, error

    def __iter__(self):
        for position, index in enumerate(torch.randperm(len(self.batches)).tolist()):
            if self.error is not None and position == 5:
                raise self.error
            yield self.batches[index]


@pytest.mark.parametrize("error", [None, RuntimeError("halfway"), KeyboardInterrupt()])
@pytest.mark.parametrize("train_mode", [False, True])
def test_fit_leaves_the_model_as_it_was(
    dropout_model: nn.Module, batches: list[Tensor], error: BaseException | None, train_mode: bool
) -> None:
    dropout_model.train(train_mode)
    dropout_model[0].training = not train_mode
    before = snapshot(dropout_model)
    loader = Trap(batches, error)
    if error is None:
        stochbn.fit(dropout_model, loader, dropout=True, progress=False)
    else:
        with pytest.raises(type(error)):
            stochbn.fit(dropout_model, loader, dropout=True, progress=False)
    assert_unchanged(dropout_model, before)


def test_exception_inside_the_forward_pass(model: nn.Module, batches: list[Tensor]) -> None:
    wrong = torch.rand(16, 1, 12, 12)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        stochbn.fit(model, [*batches[:3], wrong], progress=False)
    assert_unchanged(model, before)


class Shared(nn.Module):
    """One BatchNorm layer below two parents."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4)
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), norm), nn.Sequential(nn.Linear(4, 4), norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Remembers(nn.Module):
    """Binds buffers and attributes anew in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.seen = 0.9 * self.seen + y.detach().mean(0)
        self.last = self.latest = y
        return y + 0.1 * self.seen


@pytest.mark.parametrize("kind", [Shared, Remembers])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_nothing_drawn_stays_behind(kind: type[nn.Module], chunk_size: int | None) -> None:
    batches = [torch.randn(8, 4) for _ in range(6)]
    model = calibrate(kind(), batches)
    model.last = None
    model.__dict__.pop("latest", None)
    before = snapshot(model)
    stats = stochbn.fit(model, batches, progress=False)
    for _ in range(2):
        stochbn.predict(model, stats, batches[0], num_samples=5, chunk_size=chunk_size)
    stochbn.exact_predict(model, batches, batches[0], num_samples=3)
    assert_unchanged(model, before)
    assert model.last is None
    assert not hasattr(model, "latest")
    copy.deepcopy(model)
    if kind is Shared:
        draws = stats.sample(5, seed=0)
        x = torch.randn(3, 4)
        pred = stochbn.predict(model, stats, x, num_samples=5, chunk_size=chunk_size, link="identity")
        for index in range(5):
            twin = copy.deepcopy(model).eval()
            twin.a[1].running_mean.copy_(draws[index]["a.1.running_mean"])
            twin.a[1].running_var.copy_(draws[index]["a.1.running_var"])
            torch.testing.assert_close(pred.samples[index], twin(x), rtol=1e-5, atol=1e-6)


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


def test_batches_are_not_written_to() -> None:
    class InPlace(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    batches = [torch.randn(8, 4) for _ in range(4)]
    kept = [batch.clone() for batch in batches]
    model = calibrate(InPlace(nn.BatchNorm1d(4)), [batch.clone() for batch in batches])
    stochbn.fit(model, batches, progress=False)
    stochbn.exact_predict(model, batches, batches[0], num_samples=2)
    assert all(torch.equal(a, b) for a, b in zip(batches, kept, strict=True))


def test_predict_and_exact_leave_the_model_as_it_was(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor
) -> None:
    dropout_model.train()
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    wrong = torch.rand(2, 1, 12, 12)
    before = snapshot(dropout_model)
    stochbn.predict(dropout_model, stats, x, num_samples=4, dropout=True)
    stochbn.exact_predict(dropout_model, Trap(batches, None), x, num_samples=4)
    with pytest.raises(RuntimeError):
        stochbn.predict(dropout_model, stats, wrong, num_samples=4, dropout=True)
    with pytest.raises(RuntimeError):
        stochbn.exact_predict(dropout_model, Trap(batches, RuntimeError()), x, num_samples=8)
    assert_unchanged(dropout_model, before)


def test_dropout_is_active_only_when_asked(dropout_model: nn.Module) -> None:
    batches = [torch.ones(20, 400)] * 30
    model = calibrate(nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(400)), batches)
    with pytest.warns(UserWarning, match="does not look like the training data"):
        off = stochbn.fit(model, batches, progress=False).layers["1"].moments
    assert off.variance[0].max() == 0
    on = stochbn.fit(model, batches, dropout=True, progress=False).layers["1"].moments
    # Of ones, Dropout(p) makes batch means of mean 1 and variance p / (1 − p) / M; 5 standard errors over 400 channels.
    variance = 0.2 / 0.8 / 20
    assert on.mean[0].mean().item() == pytest.approx(1, abs=5 * math.sqrt(variance / (30 * 400)))
    assert on.variance[0].mean().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / (29 * 400)))

    with evaluating(dropout_model, dropout=True):
        assert [m.training for m in dropout_model] == [isinstance(m, nn.Dropout) for m in dropout_model]


# ---- bad input


def test_no_batch_norm(batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"with batch normalization, got Linear without any.*predict\(model, None"):
        stochbn.fit(nn.Linear(2, 2), batches)


def test_no_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"got '0' with track_running_stats=False.*layers=lambda"):
        stochbn.fit(model, [torch.randn(4, 2)] * 2)
    for _ in range(50):
        model(torch.randn(9, 2))
    stats = stochbn.fit(
        model, [torch.randn(9, 2)] * 2, layers=lambda name, layer: layer.running_mean is not None, progress=False
    )
    assert list(stats.layers) == ["1"]
    assert stats.excluded == ("0",)


def test_lazy_layer() -> None:
    with pytest.raises(ValueError, match=r"got the lazy '0'\. Run the model once"):
        find_layers(nn.Sequential(nn.LazyBatchNorm1d()))


def test_layers_by_name_pattern_and_predicate(model: nn.Module) -> None:
    assert list(find_layers(model)) == ["1", "4", "7"]
    assert list(find_layers(model, "1")) == ["1"]
    assert list(find_layers(model, ["[47]"])) == ["4", "7"]
    assert list(find_layers(model, lambda name, layer: isinstance(layer, nn.BatchNorm1d))) == ["7"]


def test_layers_that_match_nothing(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"got \['9'\], which match none. The model has '1', '4', '7'"):
        find_layers(model, ["1", "9"])
    with pytest.raises(ValueError, match="at least one BatchNorm layer, got none of 3"):
        find_layers(model, lambda name, layer: False)
    with pytest.raises(ValueError, match="got none of 3"):
        find_layers(model, [])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="got none of 3"):  # a wholly frozen model
        find_layers(model, lambda name, layer: layer.weight.requires_grad)


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
