"""Losses of single inputs, against what `predict` gives for the same draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import norm
from torch import Tensor, nn

import stochbn
from oracles import calibrate
from stochbn.inference.held_out import NO_ANSWER, HeldOut
from stochbn.statistics.calls import call_on_item


def prepare(model: nn.Module, stats: stochbn.Distribution, data: list[tuple[Tensor, Tensor]], link: str) -> HeldOut:
    return HeldOut(
        [model], [stats], data, call_on_item, None, link, num_samples=4, seed=0, dropout=False, progress=False
    )


def test_losses_are_those_of_each_input_in_order(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    labels = torch.arange(7) % 3
    losses = prepare(model, stats, [(x[:4], labels[:4]), (x[4:], labels[4:])], "softmax").measure(
        (0.5, 2.0), (1.0, 2.0), ""
    )
    assert losses.values.shape == (3, 2, 7)
    assert losses.spreads == (None, 0.5, 2.0)
    assert losses.num_labels == 2  # it stops counting there
    assert losses.num_mistakes == int((model(x).argmax(1) != labels).sum())
    for row, spread in enumerate(losses.spreads):
        for column, temperature in enumerate(losses.levels):
            tuning = stochbn.Tuning(spread, temperature)
            source = tuning if spread is None else replace(stats, tuning=tuning)
            probs = stochbn.predict(model, source, x, num_samples=4).probs
            expected = -probs.gather(1, labels[:, None])[:, 0].log().double()
            torch.testing.assert_close(losses.values[row, column], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("link", ["softmax", "identity"])
def test_parts_of_the_draws_are_left_out_one_by_one(
    link: str, model: nn.Module, stats: stochbn.Distribution, x: Tensor
) -> None:
    labels = torch.arange(7) % 3 if link == "softmax" else torch.randn(7, 3)
    held_out = replace(prepare(model, stats, [(x[:4], labels[:4]), (x[4:], labels[4:])], link), num_samples=10)
    losses = held_out.measure((1.0, 3.0), (0.5, 1.0), "")
    assert losses.without.shape == (3, 2, 4)
    # No draws, no noise: the plain network is the same whichever part is left out.
    torch.testing.assert_close(losses.without[0], losses.values[0].mean(1)[:, None].expand(-1, 4))
    for row, spread in ((1, 1.0), (2, 3.0)):
        drawn = stochbn.predict(
            model, replace(stats, tuning=stochbn.Tuning(spread)), x, num_samples=10, link="identity"
        )
        assert drawn.samples is not None
        outputs = drawn.samples.double().numpy()
        for column, level in enumerate(losses.levels):
            for part, left_out in enumerate([[0, 1, 8, 9], [2, 3], [4, 5], [6, 7]]):
                kept = np.delete(outputs, left_out, axis=0)
                if link == "softmax":
                    probs = softmax(kept / level, axis=2).mean(0)
                    expected = -np.log(probs[np.arange(7), labels.numpy()]).mean()
                else:
                    scale = np.sqrt(kept.var(0) + level**2)
                    expected = -norm.logpdf(labels.numpy(), kept.mean(0), scale).sum(1).mean()
                assert losses.without[row, column, part].item() == pytest.approx(expected, rel=1e-4)


def test_autocast_leaves_the_losses_exact(model: nn.Module, stats: stochbn.Distribution, x: Tensor) -> None:
    """The network runs in bfloat16, but what its probabilities add up to does not."""
    held_out = replace(prepare(model, stats, [(x, torch.arange(7) % 3)], "softmax"), num_samples=6)
    with torch.autocast("cpu"):
        losses = held_out.measure((1.0,), (1.0,), "")
        outputs = stochbn.predict(model, stats, x, num_samples=6, link="identity").samples
    assert outputs is not None
    probs = outputs.float().softmax(2).mean(0)
    expected = -probs[torch.arange(7), torch.arange(7) % 3].log().double()
    torch.testing.assert_close(losses.values[1, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_samples", [8, 64])
def test_the_standard_error_is_that_of_other_draws(
    num_samples: int, model: nn.Module, stats: stochbn.Distribution, x: Tensor
) -> None:
    """Over 100 seeds, the variance of a difference is what its jackknife says.

    The ratio of the two has a standard deviation of √(2/99) for the variance, and √(2/3/100) for the mean of 100
    jackknifes with 3 degrees of freedom each, 0.16 together; four of them are allowed, and log p's own bias.
    """
    labels = torch.arange(7) % 3
    differences, variances = [], []
    for seed in range(100):
        held_out = replace(prepare(model, stats, [(x, labels)], "softmax"), num_samples=num_samples, seed=seed)
        losses = held_out.measure((1.0, 3.0), (1.0,), "")
        without = losses.without[2, 0] - losses.without[1, 0]
        differences.append(float(losses.values[2, 0].mean() - losses.values[1, 0].mean()))
        variances.append(3 * float(without.var(correction=0)))
    assert np.mean(variances) / np.var(differences, ddof=1) == pytest.approx(1, abs=0.65)


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_places_are_averaged_and_labels_added(link: str, batches: list[Tensor]) -> None:
    net = calibrate(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)), batches)
    stats = stochbn.fit(net, batches, progress=False)
    x, outputs = batches[0], net(batches[0]).detach()
    labels = {
        "softmax": torch.randint(3, (16, 6, 6)),
        "sigmoid": torch.randint(2, (16, 3, 6, 6)),
        "identity": torch.randn(16, 3, 6, 6),
    }[link]
    held_out = prepare(net, stats, [(x, labels)], link)
    losses = held_out.measure((), (1.0,), "")
    found = losses.values[0, 0]
    assert losses.num_mistakes == (0 if link == "identity" else 16)  # labels by chance: some are wrong in every input
    labels_of_its_own = {"softmax": outputs.argmax(1), "sigmoid": (outputs > 0).long(), "identity": labels}[link]
    labels_of_its_own[3:5] = labels[3:5]
    right = prepare(net, stats, [(x, labels_of_its_own)], link).measure((), (1.0,), "")
    assert right.num_mistakes == (0 if link == "identity" else 2)
    if link == "softmax":
        expected = nn.functional.cross_entropy(outputs, labels, reduction="none").mean((1, 2))
    elif link == "sigmoid":
        binary = nn.functional.binary_cross_entropy_with_logits(outputs, labels.float(), reduction="none")
        expected = binary.sum(1).mean((1, 2))
    else:
        expected = (0.5 * math.log(2 * math.pi) + (labels - outputs).square() / 2).sum(1).mean((1, 2))
    torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-5)


class Overflowing(nn.Module):
    """Gives no number where its input is far from 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().amax(1, keepdim=True) < 50, x, math.inf)


@pytest.mark.parametrize("link", ["softmax", "identity"])
def test_a_spread_that_overflows_is_no_answer(link: str) -> None:
    net = calibrate(nn.Sequential(nn.BatchNorm1d(3), Overflowing()), [torch.randn(8, 3) for _ in range(9)])
    stats = stochbn.fit(net, [torch.randn(8, 3) for _ in range(9)], progress=False)
    labels = torch.arange(4) % 3 if link == "softmax" else torch.randn(4, 3)
    values = prepare(net, stats, [(torch.randn(4, 3), labels)], link).measure((1.0, 60.0), (1.0,), "").values
    assert values.isfinite().all()
    if link == "identity":
        assert (values[2] >= NO_ANSWER).any()
        assert (values[:2] < NO_ANSWER / 1000).all()
