"""Each input as one of its own mini-batch: against mini-batches made for the purpose, and a naive loop."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import stochbn
from oracles import NormAct, calibrate, naive
from stochbn.inference.engine.affine import fold_single, normalise_with, squash_rows
from stochbn.statistics.normalization import BatchNormCall

pytestmark = pytest.mark.usefixtures("path")  # each test on both


def companions(mean: Tensor, var: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """An even number of examples that have exactly these statistics: half of them μ + σ everywhere, half μ − σ."""
    assert count % 2 == 0
    sides = torch.tensor([1.0, -1.0], dtype=mean.dtype).repeat(count // 2)
    values = mean + sides[:, None] * var.sqrt()
    return values.view(count, -1, *(1 for _ in shape)).expand(count, -1, *shape)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)])
def test_equals_a_mini_batch_with_the_input_in_it(shape: tuple[int, ...]) -> None:
    x = torch.randn(6, 3, *shape, dtype=torch.float64) * 3 + 1
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.1
    weight, bias = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    others = companions(mean, var, 8, shape)
    expected = torch.cat(
        [F.batch_norm(torch.cat([one[None], others]), None, None, weight, bias, True, 0.0, 1e-3)[:1] for one in x]
    )
    actual = normalise_with(
        BatchNormCall(x, mean, var, weight, bias, False, 0.1, 1e-3), torch.tensor(1 / 9, dtype=torch.float64), 6
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_parameters", [True, False])
@pytest.mark.parametrize("share", [0.0, 1 / 16, 0.5])
def test_single_values_squashed_equal_a_mini_batch(has_parameters: bool, share: float) -> None:
    x, mean = torch.randn(3, 6, 5, dtype=torch.float64) * 3, torch.randn(3, 5, dtype=torch.float64)
    var = torch.rand(3, 5, dtype=torch.float64)
    parameters = [torch.randn(5, dtype=torch.float64) if has_parameters else None for _ in range(2)]
    shares = torch.full((3,), share, dtype=torch.float64)
    maps = fold_single(mean, var, shares, *parameters, 1e-3)
    calls = [BatchNormCall(x[s], mean[s], var[s], *parameters, False, 0.1, 1e-3) for s in range(3)]
    expected = torch.cat([normalise_with(call, shares[0], 6) for call in calls])
    actual = squash_rows(x.flatten(0, 1), *maps, num_draws=3, is_drawn=True)
    torch.testing.assert_close(actual, expected)


def test_of_many_one_does_not_count() -> None:
    x, mean, var = torch.randn(6, 3, 4), torch.randn(3), torch.rand(3) + 0.1
    call = BatchNormCall(x, mean, var)
    torch.testing.assert_close(normalise_with(call, torch.tensor(0.0), 6), F.batch_norm(*call), rtol=1e-4, atol=1e-5)


class Conditioned(nn.Module):
    """The oracle: a BatchNorm layer that puts each example among companions with its buffers' statistics."""

    def __init__(self, layer: _BatchNorm, batch_size: int) -> None:
        super().__init__()
        self.layer, self.batch_size = layer, batch_size

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        others = companions(layer.running_mean, layer.running_var, self.batch_size - 1, tuple(x.shape[2:]))
        rows = [
            F.batch_norm(torch.cat([one[None], others]), None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
            for one in x
        ]
        output = torch.cat([row[:1] for row in rows])
        return output.relu() if isinstance(layer, NormAct) else output


def condition(network: nn.Module, batch_size: int) -> None:
    for position, layer in enumerate(network):
        if isinstance(layer, _BatchNorm):
            network[position] = Conditioned(layer, batch_size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size": 1},
        {"chunk_size": 4},
        pytest.param({"compile": True}, marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")),
    ],
)
@pytest.mark.parametrize(("spread", "batch_size"), [(1.0, 17), ((17 / 5) ** 0.5, 5)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_equals_the_naive_loop(
    spread: float, batch_size: int, options: dict[str, object], model: nn.Module, x: Tensor
) -> None:
    """At a wider spread the input is one of a smaller mini-batch."""
    batches = [torch.rand(17, 1, 8, 8) for _ in range(12)]
    for layer in model:
        if isinstance(layer, _BatchNorm):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    calibrate(model, batches)
    stats = stochbn.fit(model, batches, conditioned=True, progress=False)
    stats = replace(stats, tuning=stochbn.Tuning(spread))
    before = copy.deepcopy(model.state_dict())
    pred = stochbn.predict(model, stats, x, num_samples=9, seed=2, **options)
    expected = naive(model, stats.sample(9, seed=2), x, lambda network: condition(network, batch_size))
    torch.testing.assert_close(pred.samples, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_changes_predictions_and_depends_on_no_other_input(
    model: nn.Module, stats: stochbn.Distribution, x: Tensor
) -> None:
    conditioned = replace(stats, conditioned=True)
    plain = stochbn.predict(model, stats, x).probs
    whole = stochbn.predict(model, conditioned, x).probs
    assert (whole - plain).abs().max() > 1e-4
    one_by_one = torch.cat([stochbn.predict(model, conditioned, one[None]).probs for one in x])
    torch.testing.assert_close(whole, one_by_one, rtol=1e-4, atol=1e-6)


def test_it_is_closer_to_exact_inference(model: nn.Module, batches: list[Tensor]) -> None:
    """Odd inputs disturb the statistics of their own mini-batch, which only conditioning follows."""
    more = [torch.rand(16, 1, 8, 8) for _ in range(200)]
    calibrate(model, more)
    odd = torch.rand(20, 1, 8, 8) * 4 - 2
    stats = stochbn.fit(model, more, progress=False)
    exact = stochbn.exact_predict(model, more, odd, num_samples=100).probs
    apart, together = (
        (stochbn.predict(model, replace(stats, conditioned=flag), odd, num_samples=100).probs - exact)
        .abs()
        .sum(1)
        .mean()
        for flag in (False, True)
    )
    assert together < apart / 2


def test_the_part_of_an_input_follows_the_spread(stats: stochbn.Distribution) -> None:
    stats = replace(stats, conditioned=True)
    first, *_, last = stats.layers

    def shares(stats: stochbn.Distribution, **options: float) -> list[float]:
        drawn = stats.sample(3, seed=0, **options)[1:].shares
        assert drawn.keys() == stats.layers.keys()
        assert all(len(share) == 2 and share[0] == share[1] for share in drawn.values())
        return [drawn[first][0].item(), drawn[last][0].item()]

    assert shares(stats) == [1 / 16, 1 / 16]
    assert shares(stats, spread=2) == [1 / 4, 1 / 4]
    assert shares(stats, spread=8) == [1 / 2, 1 / 2]  # a mini-batch has two at least
    by_layer = dict.fromkeys(stats.layers, 1.0) | {last: 1.5}
    assert shares(replace(stats, tuning=stochbn.Tuning(by_layer)), spread=2) == [1 / 4, 1 / 2]


def test_impossible_shares_are_refused(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    draws = stats.sample(3, seed=0)
    with pytest.raises(ValueError, match=r"shares of shape \(3,\)"):
        replace(draws, shares={"1": torch.ones(2)})
    with pytest.raises(ValueError, match=r"unexpected: 'nowhere\.running_mean'"):
        stochbn.predict(model, replace(draws, shares={"nowhere": torch.ones(3)}), x)


def test_without_spread_no_input_counts(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    centre, conditioned = (replace(stats, conditioned=flag).sample(1, spread=0, seed=0) for flag in (False, True))
    torch.testing.assert_close(
        stochbn.predict(model, conditioned, x).probs, stochbn.predict(model, centre, x).probs, rtol=1e-4, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:The NLL is lowest")
@pytest.mark.filterwarnings("ignore:Held-out data with")
def test_each_spread_that_is_tried_counts_inputs_its_own_way(
    model: nn.Module, stats: stochbn.Distribution, x: Tensor
) -> None:
    stats, labels = replace(stats, conditioned=True), torch.arange(len(x)) % 3
    tuned = stochbn.tune(model, stats, [(x, labels)], progress=False)
    for spread, temperature, loss in tuned.tuning.curve[:3]:
        tried = replace(stats.sample(8, spread=spread, seed=0), temperature=temperature)
        probs = stochbn.predict(model, tried, x).probs
        assert loss == pytest.approx(stochbn.nll(probs, labels).item(), rel=1e-4)


def test_gradients_reach_the_input(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    x.requires_grad_()
    conditioned = replace(stats, conditioned=True)
    stacked = torch.autograd.grad(stochbn.predict(model, conditioned, x, num_samples=4).entropy.sum(), x)[0]
    looped = torch.autograd.grad(stochbn.predict(model, conditioned, x, num_samples=4, chunk_size=1).entropy.sum(), x)[
        0
    ]
    torch.testing.assert_close(stacked, looped, rtol=1e-3, atol=1e-6)
    assert stacked.abs().max() > 0


class Folded(nn.Module):
    """Normalises T parts of each input together: in a dimension of their own, or folded into the batch."""

    def __init__(self, fold: bool) -> None:
        super().__init__()
        self.fold = fold
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:  # (N, 3, T)
        if self.fold:
            count, _, parts = x.shape
            x = self.norm(x.movedim(2, 1).flatten(0, 1)).unflatten(0, (count, parts)).movedim(1, 2)
        else:
            x = self.norm(x)
        return self.head(x.square().mean(2))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}])
def test_parts_of_an_input_in_the_batch_are_counted_together(options: dict[str, object]) -> None:
    batches = [torch.randn(8, 3, 5) for _ in range(30)]
    whole = calibrate(Folded(fold=False), batches)
    folded = Folded(fold=True).eval()
    folded.load_state_dict(whole.state_dict())
    stats = stochbn.fit(whole, batches, conditioned=True, progress=False)
    odd = 3 * torch.randn(6, 3, 5)
    expected = stochbn.predict(whole, stats, odd, **options).probs
    torch.testing.assert_close(stochbn.predict(folded, stats, odd, **options).probs, expected)


def test_a_model_that_regroups_its_batch_is_refused() -> None:
    class Pairs(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[: len(x) // 2])

    batches = [torch.randn(8, 3) for _ in range(5)]
    model = calibrate(Pairs(nn.BatchNorm1d(3)), batches)
    stats = stochbn.fit(model, batches, conditioned=True, progress=False)
    with pytest.raises(ValueError, match=r"multiple of 6 inputs.*conditioned=False"):
        stochbn.predict(model, stats, torch.randn(6, 3))
