"""The rule on tables of losses made by hand, and paired standard errors against NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from stochbn.inference.choosing import Choice, choose_nearest, compare
from stochbn.inference.held_out import Losses


def table(*means: float, noise: float = 1.0, size: int = 100) -> Tensor:
    """Rows (R, N) with these means exactly, whose differences have a standard error of about √2 · noise / √N."""
    generator = torch.Generator().manual_seed(0)
    rows = noise * torch.randn(len(means), size, generator=generator, dtype=torch.float64)
    return rows - rows.mean(1, keepdim=True) + torch.tensor(means, dtype=torch.float64)[:, None]


def test_paired_differences_against_numpy() -> None:
    one, other = table(1.0, 1.5)
    difference, error = compare(one, other)
    gaps = one.numpy() - other.numpy()
    assert difference == pytest.approx(gaps.mean())
    assert error == pytest.approx(gaps.std(ddof=1) / np.sqrt(100))
    common = 50 * torch.randn(100, dtype=torch.float64)  # what both share costs nothing
    assert compare(one + common, other + common) == pytest.approx((difference, error))
    assert compare(one, one) == (0, 0)
    assert compare(one[:1], other[:1])[1] == math.inf


def test_the_draws_own_noise_by_the_jackknife() -> None:
    """Means of independent parts, each left out once: the standard error of a mean, as NumPy has it."""
    one, other = table(1.0, 1.5)
    parts = np.random.default_rng(0).normal(size=4)
    without = torch.tensor([np.delete(parts, part).mean() for part in range(4)])
    difference, error = compare(one, other, without)
    assert (difference, error) == pytest.approx(
        (-0.5, math.hypot(compare(one, other)[1], parts.std(ddof=1) / np.sqrt(4)))
    )
    rows, means = table(1.0, 0.5, noise=0.01), torch.zeros(2, 4)
    assert choose_nearest(rows, distances=[0, 1], without=means) == 1
    means[1] = without
    assert error < 0.5
    assert choose_nearest(rows, distances=[0, 1], without=means) == 1
    assert choose_nearest(rows, distances=[0, 1], without=10 * means) == 0  # better, but by what few draws may do


@pytest.mark.parametrize(
    ("means", "chosen"),
    [
        ((1.0, 0.95, 0.9), 0),  # better by less than a standard error, 0.14: the fitted one stands
        ((1.0, 0.95, 0.5), 2),  # only the best is near the best
        ((1.0, 0.55, 0.5), 1),  # nearer to the fitted one, and as good as the best
        ((1.0, 0.5, 0.55), 1),
        ((0.5, 1.0, 0.45), 0),
        ((1.0, 1.0, 1.0), 0),
    ],
)
def test_the_rule(means: tuple[float, ...], chosen: int) -> None:
    assert choose_nearest(table(*means), distances=[0, 1, 2]) == chosen
    order = [2, 0, 1]  # wherever a row stands
    assert order[choose_nearest(table(*means)[order], distances=[2, 0, 1])] == chosen


def test_equal_distances_go_to_the_lower_loss() -> None:
    assert choose_nearest(table(0.5, 1.0, 0.45), distances=[1, 0, 1]) == 2
    assert choose_nearest(table(0.45, 1.0, 0.5), distances=[1, 0, 1 + 1e-12]) == 0


def test_one_input_chooses_nothing() -> None:
    assert choose_nearest(torch.tensor([[1.0], [0.1]]), distances=[0, 1]) == 0


def choice(values: Tensor, is_free: bool = True) -> Choice:
    """Rows for the plain network and spreads 0.5, 1 and 2; columns for temperatures 0.5, 1 and 2."""
    return Choice(losses_of((None, 0.5, 1.0, 2.0), values), 1, is_free, False)


def losses_of(spreads: tuple[float | None, ...], values: Tensor, num_mistakes: int = 50) -> Losses:
    """Losses at temperatures 0.5, 1 and 2, to which four parts of the draws make no difference."""
    return Losses(spreads, (0.5, 1.0, 2.0), values, values.mean(2, keepdim=True).expand(-1, -1, 4), 3, num_mistakes)


def test_no_spread_is_to_blame_for_the_temperature() -> None:
    """At temperature 1 the narrow spread is better; each at its best temperature, they are alike."""
    means = [(0.9, 0.9, 0.9), (0.9, 0.5, 0.6), (0.5, 0.9, 1.2), (1.0, 1.0, 1.0)]
    values = torch.stack([table(*row, noise=0.1) for row in means])
    rows, distances = [1, 2, 3], [1.0, 0.0, 1.0]
    free, fixed = choice(values), choice(values, is_free=False)
    assert free.choose(rows, distances) == (2, 0)
    assert fixed.choose(rows, distances) == (1, 1)
    assert "Draws are narrower than fitted, for an NLL lower by 0.4" in fixed.verdict(1, 1, fixed.scores())[-1]
    assert free.reference == (2, 1)
    [score] = [one for one in free.scores() if (one.spread, one.temperature) == (1.0, 0.5)]
    gaps = (values[2, 0] - values[2, 1]).numpy()
    assert score.difference == pytest.approx(-0.4)
    assert score.standard_error == pytest.approx(gaps.std(ddof=1) / 10)


def test_a_temperature_does_not_narrow_the_draws() -> None:
    """An overconfident network: the narrow spread is a little better, and the fitted one as good but for chance."""
    means = 0.9, 0.9, 0.6, 0.9, 0.7, 0.5, 0.9, 0.7, 0.505, 1.0, 0.6, 0.7
    found = choice(table(*means, noise=0.1).unflatten(0, (4, 3)))
    assert found.best_row([1, 2, 3]) == 1
    assert found.choose([1, 2, 3], [1.0, 0.0, 1.0]) == (2, 2)


def test_another_spread_has_to_be_better_than_the_fitted_one() -> None:
    """At temperature 1 the narrow spread is near the best, since it is noisy; but it is worse than the fitted one."""
    noise = table(*[0.0] * 3, noise=1.0)
    fitted = torch.stack([0.6 + 0 * noise[0], 0.6 + 0 * noise[0], 0.51 + 0.01 * noise[0]])
    narrow = torch.stack([0.6 + 0 * noise[0], 0.53 + noise[1], 0.5 + 0.01 * noise[2]])
    found = choice(torch.stack([fitted, narrow, fitted, fitted + 1]))
    assert found.choose([1, 2, 3], [1.0, 0.0, 1.0]) == (1, 2)
    assert "for an NLL lower by 0.0100" in found.verdict(1, 2, found.scores())[-1]


def test_verdicts() -> None:
    flat = choice(torch.stack([table(1.0, 1.0, 1.0) for _ in range(4)]))
    assert flat.choose([1, 2, 3], [1.0, 0.0, 1.0]) == (2, 1)
    said = flat.verdict(2, 1, flat.scores())
    assert (
        said[-1]
        == "100 inputs are too few to choose: no difference exceeds its standard error. So the fitted spread stands."
    )
    means = [(2.0, 1.0, 0.2), (1.2, 1.2, 1.2), (0.9, 0.9, 0.9), (1.2, 1.2, 1.2)]
    sure = choice(torch.stack([table(*row, noise=0.1) for row in means]))
    won, confident, stands = sure.verdict(2, 1, sure.scores())
    assert (
        "the plain network at temperature 2 (the end of what was tried) had a lower NLL than draws at spread 1" in won
    )
    assert won.endswith("; draws may still help out of domain.")
    assert confident == "The plain network is overconfident: its best temperature is 2."
    assert stands == "No spread is better than the fitted one by more than one standard error, so that stands."


@pytest.mark.parametrize("num_mistakes", [0, 9, 10])
def test_ten_mistakes_decide(num_mistakes: int) -> None:
    values = torch.ones(1, 3, 50)
    losses = losses_of((None,), values, num_mistakes)
    assert Choice(losses, 1, True, False).is_decisive == (num_mistakes == 10)
    assert Choice(losses, None, True, False).is_decisive  # a noise level, which needs none
