"""Adaptive sampling: its stopping rule is a confidence statement, so its coverage is tested."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn
from stochbn.inference.adaptive import MAX_DRAWS, QUANTILES, predict_adaptively


class Noise:
    """A network whose outputs are known: centre + spread · z for each input, z antithetic in pairs."""

    num_draws = MAX_DRAWS
    dropout = False
    temperature = 1.0

    def __init__(self, centre: Tensor, spread: Tensor, seed: int = 0) -> None:
        half = torch.randn(self.num_draws // 2, *centre.shape, generator=torch.Generator().manual_seed(seed))
        self.outputs = centre + spread * torch.stack([half, -half], 1).flatten(0, 1)
        self.made = 0

    def active(self) -> nullcontext[None]:
        return nullcontext()

    def run(self, item: Tensor, chunk_size: int | None, first: int, last: int) -> Iterator[Tensor]:
        self.made += (last - first) * len(item)
        yield self.outputs[first:last, item]


def known(link: str, count: int = 1500) -> tuple[Noise, Tensor]:
    """Inputs from certain to undecided, and their true mean, from many independent draws."""
    generator = torch.Generator().manual_seed(1)
    centre = torch.randn(count, 3, generator=generator) * torch.rand(count, 1, generator=generator) * 4
    spread = torch.rand(count, 1, generator=generator) * 2
    more = torch.randn(20000, 3, generator=generator)
    total = torch.zeros(count, 3, dtype=torch.float64)
    for z in more.split(500):
        values = centre + spread * z.unsqueeze(1)
        values = values.softmax(2) if link == "softmax" else values.sigmoid() if link == "sigmoid" else values
        total += values.double().sum(0)
    return Noise(centre, spread), (total / len(more)).float()


def test_quantiles_are_students() -> None:
    assert len(QUANTILES) == 7
    for count, quantile in QUANTILES.items():
        expected = scipy.stats.t.ppf(1 - 0.05 / 7 / 2, df=count / 2 - 1)
        assert quantile == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_the_statement_holds_for_at_least_95_percent(link: str) -> None:
    network, truth = known(link)
    tolerance = 0.05
    pred = predict_adaptively([network], torch.arange(1500), link, tolerance=tolerance)
    stopped = pred.counts < MAX_DRAWS
    assert stopped.float().mean() > 0.3
    if link == "identity":
        right = ((pred.mean - truth).abs() <= tolerance).all(1)
    elif link == "sigmoid":
        binary = [torch.stack([p, 1 - p], 1) for p in (pred.probs, truth)]
        close = (stochbn.entropy(binary[0]) - stochbn.entropy(binary[1])).abs() <= tolerance
        right = (close & ((pred.probs > 0.5) == (truth > 0.5))).all(1)
    else:
        close = (pred.entropy - stochbn.entropy(truth)).abs() <= tolerance
        right = close & (pred.probs.argmax(1) == truth.argmax(1))
    covered = int(right[stopped].sum())
    # One-sided binomial bound: below it a rule that is right for 95 % would fall once in 10,000 times.
    assert covered >= scipy.stats.binom.ppf(1e-4, int(stopped.sum()), 0.95)


def test_certain_inputs_stop_at_once_and_undecided_ones_go_on() -> None:
    centre = torch.tensor([[9.0, 0.0, 0.0], [0.5, 0.0, -2.0], [0.0, 0.0, 0.0]])
    network = Noise(centre, torch.tensor([[0.1], [0.5], [1.0]]))
    pred = predict_adaptively([network], torch.arange(3), "softmax", tolerance=0.02)
    assert pred.counts[0] == 8
    assert 8 < pred.counts[1] <= MAX_DRAWS
    assert pred.counts[2] == MAX_DRAWS  # no class is ahead
    assert pred.num_samples == MAX_DRAWS
    assert network.made == pred.counts.sum()


def test_rare_events_are_beyond_the_statement_and_dropout_is_looked_at_later() -> None:
    network = Noise(torch.tensor([[6.0, 0.0, 0.0]]), torch.tensor([[0.1]]))
    network.outputs[16:32, :, 0] = -12.0  # none of the first 16 draws shows it
    assert predict_adaptively([network], torch.arange(1), "softmax", tolerance=0.05).counts.item() == 8
    network.dropout = True
    assert predict_adaptively([network], torch.arange(1), "softmax", tolerance=0.05).counts.item() > 32


def test_places_of_a_segmentation_must_all_settle() -> None:
    centre = torch.tensor([[9.0, 0.0], [9.0, 0.0]]).unsqueeze(2).repeat(1, 1, 4)  # two inputs, two classes, four places
    centre[1, :, 3] = 0.0
    pred = predict_adaptively([Noise(centre, torch.tensor(0.3))], torch.arange(2), "softmax", tolerance=0.02)
    assert pred.probs.shape == (2, 2, 4)
    assert pred.counts.tolist() == [8, MAX_DRAWS]


def test_a_smaller_tolerance_takes_more_draws() -> None:
    network, _ = known("softmax", 200)
    counts = [
        predict_adaptively([network], torch.arange(200), "softmax", tolerance=t).counts.float().mean()
        for t in (0.5, 0.1, 0.02)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_each_input_gets_what_a_fixed_number_gives_it(
    model: nn.Module, stats: stochbn.Factorized, batches: list[Tensor]
) -> None:
    inputs = torch.cat([batches[0], 3 * batches[1]])
    pred = stochbn.predict(model, stats, [inputs[:20], inputs[20:]], num_samples="auto", tolerance=0.02)
    assert pred.samples is None
    assert len(pred) == len(inputs) == len(pred.counts)
    assert len(pred.counts.unique()) > 1
    for count in pred.counts.unique().tolist():
        fixed = stochbn.predict(model, stats, inputs, num_samples=count)
        chosen = pred.counts == count
        for name in ("mean", "std", "entropy", "aleatoric"):
            torch.testing.assert_close(getattr(pred, name)[chosen], getattr(fixed, name)[chosen], rtol=1e-4, atol=1e-5)


def test_ensembles_with_and_without_statistics(batches: list[Tensor], x: Tensor) -> None:
    models = [calibrate(small_cnn(), batches) for _ in range(2)]
    stats = [stochbn.fit(models[0], batches, progress=False), None]
    pred = stochbn.predict(models, stats, x, num_samples="auto", tolerance=0.05)
    for row, count in enumerate(pred.counts.tolist()):
        fixed = stochbn.predict(models, stats, x[row : row + 1], num_samples=count)
        torch.testing.assert_close(pred.probs[row], fixed.probs[0], rtol=1e-4, atol=1e-5)


def test_given_draws_bound_the_number(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    pred = stochbn.predict(model, stats.sample(12, seed=0), 5 * x, num_samples="auto", tolerance=1e-6)
    assert pred.counts.max() == 12
    assert np.isin(pred.counts.numpy(), [8, 12]).all()


def test_mistakes(model: nn.Module, stats: stochbn.Factorized, x: Tensor) -> None:
    with pytest.raises(TypeError, match='a whole number or "auto"'):
        stochbn.predict(model, stats, x, num_samples="Auto")
    with pytest.raises(ValueError, match="plain network"):
        stochbn.predict(model, None, x, num_samples="auto")
    with pytest.raises(ValueError, match="tolerance above 0"):
        stochbn.predict(model, stats, x, num_samples="auto", tolerance=0)
    with pytest.raises(ValueError, match="fixed num_samples"):
        stochbn.predict(model, stats, x, num_samples="auto", compile=True)
