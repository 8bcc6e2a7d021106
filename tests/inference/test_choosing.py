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
    return Choice(Losses((None, 0.5, 1.0, 2.0), (0.5, 1.0, 2.0), values, 3, 50), 1, is_free, False)


def test_no_spread_is_to_blame_for_the_temperature() -> None:
    """At temperature 1 the narrow spread is better; each at its best temperature, they are alike."""
    means = [(0.9, 0.9, 0.9), (0.9, 0.5, 0.6), (0.5, 0.9, 1.2), (1.0, 1.0, 1.0)]
    values = torch.stack([table(*row, noise=0.1) for row in means])
    rows, distances = [1, 2, 3], [1.0, 0.0, 1.0]
    free, fixed = choice(values), choice(values, is_free=False)
    assert free.choose_row(rows, distances) == 2
    assert free.choose_level(2) == 0
    assert fixed.choose_row(rows, distances) == 1
    assert fixed.choose_level(1) == 1
    assert "Draws are narrower than fitted, for an NLL lower by 0.4" in fixed.verdict(1, 1, fixed.scores())[-1]
    assert free.reference == (2, 1)
    [score] = [one for one in free.scores() if (one.spread, one.temperature) == (1.0, 0.5)]
    gaps = (values[2, 0] - values[2, 1]).numpy()
    assert score.difference == pytest.approx(-0.4)
    assert score.standard_error == pytest.approx(gaps.std(ddof=1) / 10)


def test_verdicts() -> None:
    flat = choice(torch.stack([table(1.0, 1.0, 1.0) for _ in range(4)]))
    assert flat.choose_row([1, 2, 3], [1.0, 0.0, 1.0]) == 2
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
    losses = Losses((None,), (0.5, 1.0, 2.0), values, 3, num_mistakes)
    assert Choice(losses, 1, True, False).is_decisive == (num_mistakes == 10)
    assert Choice(losses, None, True, False).is_decisive  # a noise level, which needs none
