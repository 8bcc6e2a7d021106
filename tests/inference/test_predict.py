"""Predictions against naive loops over copies, however they are computed."""

import copy
import gc
import math
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stochbn
from oracles import calibrate, centred, naive, small_cnn
from stochbn.inference.prediction import join

pytestmark = pytest.mark.usefixtures("path")  # each test on both

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


def test_spread_0_around_the_running_statistics_is_the_model(model: nn.Module, x: Tensor) -> None:
    draws = centred(model).sample(3, spread=0, seed=0)
    pred = stochbn.predict(model, draws, x)
    expected = model(x).softmax(1)
    for sample in pred.samples:
        torch.testing.assert_close(sample, expected, **ROUNDING)
    torch.testing.assert_close(pred.probs, expected, **ROUNDING)
    assert pred.std.max() < 1e-6
    moved = stochbn.predict(model, centred(model).sample(3, spread=1, seed=0), x)
    assert (moved.probs - expected).abs().max() > 1e-3  # the identity could have failed


def test_equals_copies_of_the_model_with_drawn_buffers(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    pred = stochbn.predict(model, stats, x, num_samples=20, seed=3)
    samples = naive(model, stats.sample(20, seed=3), x)
    torch.testing.assert_close(pred.samples, samples, **ROUNDING)
    torch.testing.assert_close(pred.probs, samples.mean(0), **ROUNDING)
    torch.testing.assert_close(pred.std, samples.std(0, correction=0), **ROUNDING)
    torch.testing.assert_close(pred.entropy, stochbn.entropy(samples.mean(0)), **ROUNDING)
    torch.testing.assert_close(pred.aleatoric, stochbn.expected_entropy(samples), **ROUNDING)
    torch.testing.assert_close(pred.epistemic, stochbn.mutual_information(samples), **ROUNDING)
    assert (len(pred), pred.num_samples) == (7, 20)


def test_no_statistics_is_the_plain_model(model: nn.Module, x: Tensor) -> None:
    model.train()
    pred = stochbn.predict(model, None, x)
    assert torch.equal(pred.probs, model.eval()(x).softmax(1))
    assert pred.num_samples == 1
    assert pred.std.max() == pred.epistemic.max() == 0


def test_ensemble_of_one_is_the_model(dropout_model: nn.Module, x: Tensor, batches: list[Tensor]) -> None:
    for dropout in (False, True):
        stats = stochbn.fit(dropout_model, batches, dropout=dropout, progress=False)
        for source in (None, stats):
            one = stochbn.predict(dropout_model, source, x, num_samples=4, dropout=dropout)
            several = stochbn.predict([dropout_model], source and [source], x, num_samples=4, dropout=dropout)
            assert torch.equal(one.samples, several.samples)


def test_deep_ensembles_average_their_members(batches: list[Tensor], x: Tensor) -> None:
    models = [calibrate(small_cnn(), batches) for _ in range(3)]
    plain = stochbn.predict(models, None, x)
    torch.testing.assert_close(plain.probs, torch.stack([m(x).softmax(1) for m in models]).mean(0), **ROUNDING)
    assert plain.num_samples == 3
    stats = [stochbn.fit(m, batches, progress=False) for m in models]
    pred = stochbn.predict(nn.ModuleList(models), stats, x, num_samples=5, seed=2)
    assert torch.equal(pred.samples[:5], stochbn.predict(models[0], stats[0], x, num_samples=5, seed=2).samples)
    for index in (1, 2):  # the others have draws of their own
        rows = slice(5 * index, 5 * index + 5)
        alone = stochbn.predict(models[index], stats[index], x, num_samples=5, seed=2).samples
        assert not torch.equal(pred.samples[rows], alone)
    torch.testing.assert_close(pred.probs, pred.samples.mean(0), **ROUNDING)


def test_members_weigh_the_same_however_many_draws_they_have(
    model: nn.Module, stats: stochbn.Factorized, batches: list[Tensor], x: Tensor
) -> None:
    other = calibrate(small_cnn(), batches)
    pred = stochbn.predict([model, other], [stats, None], x, num_samples=9)
    parts = [stochbn.predict(model, stats, x, num_samples=9), stochbn.predict(other, None, x)]
    assert pred.num_samples == 10
    for name in ("probs", "aleatoric"):
        torch.testing.assert_close(getattr(pred, name), sum(getattr(p, name) for p in parts) / 2, **ROUNDING)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 20, 100])
def test_chunks_and_the_loop_give_the_same(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor, chunk_size: int, dropout: bool
) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=dropout, progress=False)
    reference = stochbn.predict(dropout_model, stats, x, num_samples=20, dropout=dropout)
    pred = stochbn.predict(dropout_model, stats, x, num_samples=20, dropout=dropout, chunk_size=chunk_size)
    torch.testing.assert_close(pred.samples, reference.samples, **ROUNDING)
    torch.testing.assert_close(pred.epistemic, reference.epistemic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dropout", [False, True])
def test_batch_size_and_order_do_not_matter(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor, dropout: bool
) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=dropout, progress=False)

    def samples(inputs: object) -> Tensor:
        return stochbn.predict(dropout_model, stats, inputs, num_samples=10, dropout=dropout).samples

    reference = samples(x)
    torch.testing.assert_close(samples(x.flip(0)).flip(1), reference, **ROUNDING)
    for size in (1, 2, 7):
        loader = DataLoader(TensorDataset(x, torch.zeros(7)), batch_size=size)
        torch.testing.assert_close(samples(loader), reference, **ROUNDING)
        torch.testing.assert_close(samples(list(x.split(size))), reference, **ROUNDING)


def test_streaming_gives_the_same(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    kept = stochbn.predict(model, stats, x, num_samples=30)
    streamed = stochbn.predict(model, stats, x, num_samples=30, keep_samples=False)
    assert streamed.samples is None
    for name in ("probs", "std", "entropy", "aleatoric", "epistemic"):
        assert torch.equal(getattr(streamed, name), getattr(kept, name))


def test_streaming_over_batches(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    whole = stochbn.predict(model, stats, x, num_samples=5)
    parts = stochbn.predict(model, stats, iter(x.split(3)), num_samples=5, keep_samples=False, progress=True)
    for name in ("probs", "std", "entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-6)


def test_stacks_are_bounded_by_the_batch_not_by_s(model: nn.Module, stats: stochbn.Factorized) -> None:
    """The largest activation is the same for few and for many draws, and the whole stack never exists."""
    sizes: list[int] = []
    original = torch.Tensor.softmax

    def spy(self: Tensor, *args: int) -> Tensor:
        sizes.append(self.numel())
        return original(self, *args)

    largest = 4 * 36 * 4  # bytes of the largest activation of an input
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", spy)
        patch.setattr("stochbn.inference.engine.network.CHUNK_BYTES", 64 * largest)
        patch.setattr("stochbn.inference.engine.network.CHUNK_ROWS", 64)
        patch.setattr("stochbn.inference.predict.BLOCK_VALUES", 64 * 3)  # of chunks that are averaged at once
        stochbn.predict(model, stats, torch.rand(4, 1, 8, 8), num_samples=400, keep_samples=False)
    assert max(sizes) <= 64 * 3  # 64 stacked examples of 3 classes
    assert sum(sizes) == 400 * 4 * 3


def test_draws_are_made_in_blocks_of_bounded_size(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = stochbn.predict(model, stats, x, num_samples=40, chunk_size=4)
    sizes = []
    sample = stochbn.Factorized.sample

    def spy(self: stochbn.Factorized, num_samples: int, **options: object) -> stochbn.Draws:
        sizes.append(num_samples)
        return sample(self, num_samples, **options)

    monkeypatch.setattr(stochbn.Factorized, "sample", spy)
    monkeypatch.setattr("stochbn.inference.engine.sampling.BLOCK_NUMBERS", 2 * 20 * 9)  # the model has 20 channels
    monkeypatch.setattr("stochbn.inference.engine.sampling.FIRST_DRAWS", 4)
    pred = stochbn.predict(model, stats, [x[:4], x[4:]], num_samples=40, chunk_size=4)
    assert max(sizes) == 9
    torch.testing.assert_close(pred.samples, reference.samples, **ROUNDING)


def test_equal_seeds_equal_predictions(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    a, b, c = (stochbn.predict(model, stats, x, num_samples=3, seed=seed).samples for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    given_draws = stochbn.predict(model, stats.sample(3, seed=1), x, num_samples=1).samples
    assert torch.equal(given_draws, a)


def test_deepcopy_pickle_and_state_dict_keep_the_bits(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor
) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    reference = stochbn.predict(dropout_model, stats, x, num_samples=6, dropout=True).samples
    restored = small_cnn(dropout=0.3)
    restored.load_state_dict(dropout_model.state_dict())
    for twin in (copy.deepcopy(dropout_model), pickle.loads(pickle.dumps(dropout_model)), restored):
        assert torch.equal(stochbn.predict(twin, stats, x, num_samples=6, dropout=True).samples, reference)
    for twin_stats in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert torch.equal(
            stochbn.predict(dropout_model, twin_stats, x, num_samples=6, dropout=True).samples, reference
        )


def test_gradients_with_respect_to_inputs(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    stochbn.predict(model, stats, leaf, num_samples=4, chunk_size=2).entropy.sum().backward()
    other = x.clone().requires_grad_()
    draws = stats.sample(4, seed=0).match(model)
    probs = torch.stack([functional_call(model, draws[i], other).softmax(1) for i in range(4)]).mean(0)
    stochbn.entropy(probs).sum().backward()
    assert leaf.grad.abs().max() > 1e-4
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert not stochbn.predict(model, stats, x, num_samples=2).probs.requires_grad
    with torch.no_grad():
        assert not stochbn.predict(model, stats, leaf, num_samples=2).probs.requires_grad


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.body(x)}


def test_segmentation_and_call(x: Tensor, batches: list[Tensor]) -> None:
    model = calibrate(Segmenter(), batches)
    stats = stochbn.fit(model, batches, progress=False)
    with pytest.raises(TypeError, match=r"got dict. Pick it out with call=.*model\(x\)\['out'\]"):
        stochbn.predict(model, stats, x)
    pred = stochbn.predict(model, stats, x, num_samples=5, call=lambda model, x: model(x)["out"])
    assert pred.probs.shape == (7, 3, 8, 8)
    assert pred.entropy.shape == pred.aleatoric.shape == pred.epistemic.shape == (7, 8, 8)
    assert pred.samples.shape == (5, 7, 3, 8, 8)
    torch.testing.assert_close(pred.probs.sum(1), torch.ones(7, 8, 8))


def test_sigmoid_and_regression(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    labels = stochbn.predict(model, stats, x, num_samples=5, link="sigmoid")
    raw = stochbn.predict(model, stats, x, num_samples=5, link="identity")
    torch.testing.assert_close(labels.samples, raw.samples.sigmoid())
    assert labels.entropy.shape == (7, 3)
    torch.testing.assert_close(raw.mean, raw.samples.mean(0), **ROUNDING)
    torch.testing.assert_close(raw.std, raw.samples.std(0, correction=0), **ROUNDING)
    for name in ("probs", "entropy", "aleatoric", "epistemic"):
        with pytest.raises(AttributeError, match=f"for {name}, got 'identity': raw outputs have mean and std"):
            getattr(raw, name)
    parts = stochbn.predict(model, stats, list(x.split(3)), num_samples=5, link="identity")
    torch.testing.assert_close(parts.mean, raw.mean, **ROUNDING)


def test_mlp_regressor_is_less_sure_far_from_its_data() -> None:
    def target(x: Tensor) -> Tensor:
        return (3 * x).sin()

    model = nn.Sequential(
        nn.Linear(1, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        x = torch.rand(32, 1) * 2 - 1
        optimizer.zero_grad()
        (model(x) - target(x)).square().mean().backward()
        optimizer.step()
    stats = stochbn.fit(model, [torch.rand(32, 1) * 2 - 1 for _ in range(100)], progress=False)
    near, far = torch.linspace(-1, 1, 50)[:, None], torch.linspace(3, 4, 50)[:, None]
    inside = stochbn.predict(model, stats, near, num_samples=100, link="identity")
    outside = stochbn.predict(model, stats, far, num_samples=100, link="identity")
    assert (inside.mean - target(near)).abs().mean() < 0.2
    assert 0 < inside.std.mean() < outside.std.mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.norm(a + b))


def test_several_inputs() -> None:
    batches = [{"a": torch.randn(8, 4), "b": torch.randn(8, 4)} for _ in range(5)]
    model = Two()
    for batch in batches * 30:
        model(**batch)
    stats = stochbn.fit(model, batches, progress=False)
    a, b = torch.randn(2, 6, 4)
    by_position = stochbn.predict(model, stats, (a, b), num_samples=4)
    assert torch.equal(stochbn.predict(model, stats, {"b": b, "a": a}, num_samples=4).samples, by_position.samples)
    items = [(a[:3], b[:3], "label"), (a[3:], b[3:], "label")]
    by_call = stochbn.predict(model, stats, items, num_samples=4, call=lambda model, item: model(item[0], item[1]))
    torch.testing.assert_close(by_call.samples, by_position.samples, **ROUNDING)
    with pytest.raises(TypeError, match=r"that Two can take, got Tensor\[6, 4\].*Pass call="):
        stochbn.predict(model, stats, a, num_samples=4)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if x.sum() > 0 else 2 * x


class InPlace(nn.Module):
    """Writes drawn, batched values into a tensor that is not batched, after it has changed its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        total = torch.zeros_like(x)
        total.add_(self.norm(x))
        return total


@pytest.mark.parametrize("kind", [DataDependent, InPlace])
def test_models_that_cannot_be_vectorised_fall_back_to_a_loop_once(kind: type[nn.Module]) -> None:
    batches = [torch.randn(8, 4) for _ in range(5)]
    model = calibrate(kind(), [b.clone() for b in batches])
    stats = stochbn.fit(model, [b.clone() for b in batches], progress=False)
    x = torch.randn(6, 4)
    original = x.clone()
    with pytest.warns(UserWarning, match=f"{kind.__name__} cannot be vectorised over draws.*chunk_size=1") as caught:
        pred = stochbn.predict(model, stats, [x, x], num_samples=20)
    assert len(caught) == 1
    assert torch.equal(x, original)
    oracle = torch.stack([naive(model, stats.sample(20, seed=0)[i : i + 1], x.clone())[0] for i in range(20)])
    torch.testing.assert_close(pred.samples[:, :6], oracle, **ROUNDING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looped = stochbn.predict(model, stats, x, num_samples=20, chunk_size=1)
    torch.testing.assert_close(looped.samples, oracle, **ROUNDING)


class Joins(nn.Module):
    """Adds drawn values into others that are not drawn, as residual networks do; vmap refuses that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x) * 1
        total += self.last(x.relu())
        return total


def test_what_vmap_refuses_is_captured_however_small(recwarn: pytest.WarningsRecorder) -> None:
    batches = [torch.randn(8, 4) for _ in range(6)]
    model = calibrate(Joins(), batches)
    stats = stochbn.fit(model, batches, layers=["last"], progress=False)
    oracle = naive(model, stats.sample(5, seed=0), batches[0])
    for _ in range(2):
        pred = stochbn.predict(model, stats, batches[0], num_samples=5)
        torch.testing.assert_close(pred.samples, oracle, **ROUNDING)
    assert not recwarn.list
    x = batches[0].clone().requires_grad_()
    with pytest.warns(UserWarning, match="Joins cannot be vectorised over draws"):
        stochbn.predict(model, stats, x, num_samples=5).entropy.sum().backward()
    assert x.grad is not None
    stochbn.predict(model, stats, x, num_samples=5)  # says it once: here a warning is an error


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(batches: list[Tensor], x: Tensor, dtype: torch.dtype) -> None:
    batches = [batch.to(dtype) for batch in batches]
    model = calibrate(small_cnn().to(dtype), batches)
    stats = stochbn.fit(model, batches, progress=False)
    pred = stochbn.predict(model, stats, x.to(dtype), num_samples=8)
    assert pred.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    oracle = naive(model, stats.sample(8, seed=0), x.to(dtype)).to(pred.probs.dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(pred.samples, oracle, rtol=tolerance, atol=tolerance)


def test_randomness_of_the_models_own_differs_between_draws(stats: stochbn.Factorized, x: Tensor) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(x) + torch.randn(8, 8)).flatten(1)

    model = Noisy()
    pred = stochbn.predict(model, centred(model).sample(4, spread=0, seed=0), x, link="identity")
    assert pred.std.min() > 0


def test_loader_over_an_iterable_dataset(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(x)

    loader = DataLoader(Stream(), batch_size=3)
    pred = stochbn.predict(model, stats, loader, num_samples=3, progress=True)
    torch.testing.assert_close(pred.probs, stochbn.predict(model, stats, x, num_samples=3).probs, **ROUNDING)
    assert stochbn.exact_predict(model, [x, x, x], loader, num_samples=2).probs.shape == (7, 3)


def test_under_autocast(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    plain = stochbn.predict(model, stats, x, num_samples=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = stochbn.predict(model, stats, x, num_samples=4, chunk_size=1)
    torch.testing.assert_close(cast.probs, plain.probs, rtol=0.05, atol=0.02)


def test_model_without_batch_norm_has_dropout_and_ensembles(x: Tensor) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    pred = stochbn.predict(model, None, x, dropout=True, num_samples=30)
    assert pred.num_samples == 30
    assert pred.epistemic.min() > 0
    assert stochbn.predict([model, model], None, x).epistemic.max() == pytest.approx(0, abs=1e-6)


def test_bad_options(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    with pytest.raises(ValueError, match="num_samples of at least 1, got 0"):
        stochbn.predict(model, stats, x, num_samples=0)
    with pytest.raises(ValueError, match="chunk_size of at least 1, got 0"):
        stochbn.predict(model, stats, x, chunk_size=0)
    with pytest.raises(ValueError, match="one of 'softmax', 'sigmoid', 'identity', got 'probit'"):
        stochbn.predict(model, stats, x, link="probit")
    with pytest.raises(ValueError, match="with Dropout layers for dropout=True"):
        stochbn.predict(model, stats, x, dropout=True)
    with pytest.raises(ValueError, match="one distribution a model, got 1 for 2 models"):
        stochbn.predict([model, model], stats, x)
    with pytest.raises(TypeError, match="fitted distribution, Draws, a Tuning or None, got dict"):
        stochbn.predict(model, [{}], x)
    with pytest.raises(TypeError, match="fitted distribution, Draws, a Tuning or None, got Tensor"):
        stochbn.predict(model, x, stats)
    with pytest.raises(TypeError, match=r"got str.*stochbn.load\(path\)"):
        stochbn.predict(model, "net.sbn.safetensors", x)
    with pytest.raises(ValueError, match="a model or a sequence of models, got an empty sequence"):
        stochbn.predict([], None, x)
    with pytest.raises(TypeError, match=r"got dict\. Check the order of the arguments"):
        stochbn.predict({}, None, x)
    with pytest.raises(TypeError, match=r"tensors or batches of them, got ndarray\. Pass torch.from_numpy"):
        stochbn.predict(model, stats, x.numpy())
    with pytest.raises(TypeError, match=r"num_samples to be a whole number, got 50\.0"):
        stochbn.predict(model, stats, x, num_samples=50.0)
    with pytest.raises(ValueError, match="at least one input, got an empty batch"):
        stochbn.predict(model, stats, x[:0])
    with pytest.raises(ValueError, match="at least one input, got an empty batch"):
        stochbn.exact_predict(model, [x, x], x[:0], num_samples=2)
    assert stochbn.predict(model, stats, x, num_samples=2, seed=None).num_samples == 2
    with pytest.raises(ValueError, match="got an empty loader"):
        stochbn.predict(model, stats, [])


def test_statistics_of_another_model(stats: stochbn.Factorized, x: Tensor) -> None:
    with pytest.raises(ValueError, match="another model's"):
        stochbn.predict(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), stats, x)


def test_statistics_fitted_under_another_rule_of_dropout(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor
) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    with pytest.warns(UserWarning, match="fitted with dropout=True and are used with dropout=False"):
        stochbn.predict(dropout_model, stats, x, num_samples=2)


def test_model_that_ends_in_softmax(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    ended = nn.Sequential(*model, nn.Softmax(1))
    with pytest.raises(ValueError, match=r"probabilities already.*call=lambda model, x: model\(x\).log\(\)"):
        stochbn.predict(ended, stats, x)
    undone = stochbn.predict(ended, stats, x, call=lambda model, x: model(x).log())
    torch.testing.assert_close(undone.probs, stochbn.predict(model, stats, x).probs, **ROUNDING)


def test_non_finite_outputs(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    x[2, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf from draw 0 for input 2 of its batch"):
        stochbn.predict(model, stats, x)
    assert join([stochbn.predict(model, stats, x[:2])]).probs.isfinite().all()


def test_outputs_that_are_not_floating_point() -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).argmax(1)

    with pytest.raises(TypeError, match=r"floating-point tensor with a row an input, got torch.int64 of shape \[5\]"):
        stochbn.predict(Labels(), centred(Labels()), torch.randn(5, 3), num_samples=3)


def test_a_predictor_gives_what_predict_gives(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor, path: str
) -> None:
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    options = {"num_samples": 9, "seed": 4, "dropout": True}
    predictor = stochbn.Predictor(dropout_model, stats, **options).warm_up(x)
    expected = stochbn.predict(dropout_model, stats, x, **options)
    torch.testing.assert_close(predictor(x).samples, expected.samples, **ROUNDING)
    torch.testing.assert_close(predictor([(x[:3], 0), (x[3:], 0)]).samples, expected.samples, **ROUNDING)
    for other in (copy.deepcopy(predictor), pickle.loads(pickle.dumps(predictor)), predictor.to("cpu")):
        assert torch.equal(other(x).samples, predictor(x).samples)
    assert repr(predictor) == "Predictor(Sequential, num_samples=9)"


def test_a_predictor_is_a_snapshot(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    predictor = stochbn.Predictor(model, stats, num_samples=4)
    expected = stochbn.predict(model, stats, x, num_samples=4).samples
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(predictor(x).samples, expected, **ROUNDING)


def test_a_predictor_takes_ensembles_and_other_shapes() -> None:
    batches = [torch.rand(8, 1, 6, 6) for _ in range(6)]
    models = [
        calibrate(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), batches)
        for _ in range(2)
    ]
    stats = [stochbn.fit(one, batches, progress=False) for one in models]
    predictor = stochbn.Predictor(models, stats, num_samples=5)
    for side in (6, 9):
        x = torch.rand(4, 1, side, side)
        expected = stochbn.predict(models, stats, x, num_samples=5)
        torch.testing.assert_close(predictor(x).probs, expected.probs, **ROUNDING)


def test_threads_share_a_predictor(model: nn.Module, stats: stochbn.Factorized, batches: list[Tensor]) -> None:
    """8 threads × 200 single inputs are bit for bit what one thread gets."""
    predictor = stochbn.Predictor(model, stats, num_samples=8)
    inputs = torch.cat(batches)
    inputs = torch.cat([inputs, inputs[:8]])  # 200
    expected = [predictor(x[None]).probs for x in inputs]

    def serve(_: int) -> bool:
        return all(torch.equal(predictor(x[None]).probs, probs) for x, probs in zip(inputs, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(serve, range(8)))


def resident() -> int:
    """Bytes of memory that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore:The model has seen")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_memory_stays_where_it_was(batches: list[Tensor], path: str) -> None:
    """Thousands of calls, and models that are made and dropped."""
    if path == "stacked":
        pytest.skip("keeps nothing")

    def grow(count: int) -> int:
        for _ in range(count):
            model = calibrate(nn.Sequential(nn.Flatten(), nn.Linear(64, 16000), nn.BatchNorm1d(16000)), batches[:2])
            stats = stochbn.fit(model, batches, progress=False)
            predictor = stochbn.Predictor(model, stats, num_samples=2, keep_samples=False)
            for _ in range(30):
                predictor(batches[0][:1])
        del model, stats, predictor
        gc.collect()
        return resident()

    before = grow(5)
    made = 30 * 64 * 16000 * 4  # bytes of the weights of 30 models; each has copies
    assert grow(30) - before < made / 2


class Counting(nn.Module):
    """Keeps a number of its own, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * self.calls


@pytest.mark.parametrize("make", [Counting, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))])
def test_a_predictor_of_a_plain_network_gives_the_same_again(make: Callable[[], nn.Module]) -> None:
    """A twin serves again only if a pass leaves nothing in it."""
    model, x = make().eval(), torch.randn(4, 3)
    predictor = stochbn.Predictor(model, None)
    expected = model(x).softmax(1)
    for _ in range(3):
        torch.testing.assert_close(predictor(x).probs, expected)
