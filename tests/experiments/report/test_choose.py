import numpy as np
import pytest
import torch
from scipy import optimize

from stochbn.experiments.methods import SPREADS
from stochbn.experiments.report.choose import (
    TEMPERATURES,
    can_choose,
    choose_spread,
    choose_temperature,
    is_end,
    temper,
    temper_network,
)


def drawn(sharpness, size=500, seed=0):
    """Labels from a softmax, and the probabilities of logits that are too large by a factor."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(size, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (sharpness * logits).softmax(1), labels


def nll(probs, labels):
    return -np.log(probs[np.arange(len(labels)), labels]).mean()


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_the_temperature_is_that_of_the_lowest_nll(sharpness):
    probs, labels = drawn(sharpness)
    chosen = choose_temperature(probs, labels)

    def loss(t):  # by NumPy
        powers = probs.numpy() ** (1 / t)
        return nll(powers / powers.sum(1, keepdims=True), labels.numpy())

    expected = optimize.minimize_scalar(loss, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-6})
    assert chosen == pytest.approx(expected.x, rel=1e-4)
    assert chosen == pytest.approx(sharpness, rel=0.15)  # what the probabilities were made with, but for chance
    assert loss(chosen) <= loss(1.0)


def test_a_temperature_stays_within_its_limits():
    always_wrong = torch.tensor([[0.9, 0.1]] * 20, dtype=torch.float64), torch.ones(20, dtype=torch.long)
    hardly_sure = torch.tensor([[0.51, 0.49]] * 1000, dtype=torch.float64), torch.arange(1000) >= 990
    for data, limit in zip((hardly_sure, always_wrong), TEMPERATURES, strict=True):
        chosen = choose_temperature(data[0], data[1].long())
        assert chosen == pytest.approx(limit, rel=1e-3)
        assert is_end(chosen)
    assert not is_end(choose_temperature(*drawn(1.0)))


@pytest.mark.parametrize("num_mistakes", [0, 1, 9, 10])
def test_hardly_a_mistake_chooses_nothing(num_mistakes):
    """Nine mistakes in 1,000 answers of 90 % ask for far more confidence, and so do ten, which are believed."""
    labels = (torch.arange(1000) < num_mistakes).long()
    probs = torch.tensor([[0.9, 0.1]] * 1000, dtype=torch.float64)
    chosen = choose_temperature(probs, labels)
    assert can_choose(probs, labels) == (num_mistakes >= 10)
    if num_mistakes < 10:
        assert chosen == 1
    else:
        assert temper(probs, chosen)[0, 0].item() == pytest.approx(0.99, abs=1e-6)


def test_a_temperature_of_one_changes_nothing():
    probs, _ = drawn(1.0)
    assert torch.allclose(temper(probs, 1.0), probs)


def test_a_networks_temperature_is_that_of_its_validation_data():
    probs, labels = drawn(3.0)
    other, _ = drawn(1.0, seed=1)
    network, temperature = temper_network({"validation": (probs, probs[:, 0]), "test": (other, other[:, 0])}, labels)
    assert temperature == choose_temperature(probs, labels)
    assert torch.equal(network["test"][0], temper(other, temperature))
    assert torch.equal(network["test"][1], torch.special.entr(network["test"][0]).sum(1))


def losses(means, deviation, size=400):
    """Of each spread, with a paired difference to the first whose standard error is about deviation / 20."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(size, generator=generator, dtype=torch.float64)
    found = {}
    for spread, mean in means.items():
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        found[spread] = mean + common + deviation * (noise - noise.mean())
    return found


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ({1.0: 0.500, 2.0: 0.495, 0.5: 0.6}, 1.0),  # better, but by less than a standard error, 0.007
        ({1.0: 0.500, 2.0: 0.300, 0.5: 0.6}, 2.0),
        ({1.0: 0.500, 2**0.5: 0.303, 2.0: 0.300, 0.5: 0.6}, 2**0.5),  # as good as the best, and nearer to the fitted
        ({1.0: 0.500, 2**-0.5: 0.301, 0.5: 0.300, 2.0: 0.302}, 2**-0.5),
        ({1.0: 0.300, 2.0: 0.500}, 1.0),
        ({1.0: 0.3}, 1.0),
        ({1.0: 0.500, 2.0: 0.300, 0.5: 0.302}, 2.0),  # equally near: the better one
    ],
)
def test_the_fitted_spread_stands_unless_another_is_better_by_a_standard_error(means, expected):
    assert choose_spread(losses(means, 0.1)) == expected


def test_equal_losses_leave_the_fitted_spread():
    loss = torch.rand(9)
    assert choose_spread(dict.fromkeys(SPREADS, loss)) == 1
