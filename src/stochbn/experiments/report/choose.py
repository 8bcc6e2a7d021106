"""Validation predictions → what is chosen for a network: a temperature, a spread. Test data have no say here.

As in `stochbn.tune`, data with hardly a mistake choose nothing: a temperature of 1 and the fitted spread stand.
"""

import math
from collections.abc import Mapping

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from stochbn.experiments.report.scores import log_loss
from stochbn.inference.choosing import FEWEST_MISTAKES, choose_nearest
from stochbn.uncertainty import entropy

TEMPERATURES = (0.25, 8.0)  # the lowest and the highest that are considered

# By part of the data: probabilities (N, K), and the draws' mean entropy (N,).
Network = dict[str, tuple[Tensor, Tensor]]


def can_choose(probs: Tensor, labels: Tensor) -> bool:
    """Returns whether probabilities (N, K) have enough mistakes in them to choose by."""
    return int((probs.argmax(1) != labels).sum()) >= FEWEST_MISTAKES


def choose_temperature(probs: Tensor, labels: Tensor) -> float:
    """Returns the T whose p^(1/T), normalised, has the lowest NLL, of probabilities (N, K), none of them 0.

    Examples:
        >>> sure = torch.tensor([[0.99, 0.01]] * 40, dtype=torch.float64)
        >>> T = choose_temperature(sure, torch.tensor([0, 0, 0, 1] * 10))  # right three times in four
        >>> round(temper(sure, T)[0, 0].item(), 6)
        0.75
        >>> choose_temperature(sure, torch.zeros(40, dtype=torch.long))  # always right
        1.0
    """
    if not can_choose(probs, labels):
        return 1.0
    lowest, highest = (1 / limit for limit in TEMPERATURES)
    # The NLL is convex in 1 / T, a slope of the log-probabilities, so that a search for its minimum cannot go astray.
    found = minimize_scalar(
        lambda slope: log_loss(temper(probs, 1 / slope), labels).mean().item(),
        bounds=(highest, lowest),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return float(1 / found.x)


def is_end(temperature: float) -> bool:
    """Returns whether a chosen temperature is one of the limits, so that a better one may lie beyond it."""
    return any(math.isclose(temperature, limit, rel_tol=1e-3) for limit in TEMPERATURES)


def temper(probs: Tensor, temperature: float) -> Tensor:
    """Returns p^(1/T), normalised: what a softmax gives of logits that are divided by T."""
    return (probs.log() / temperature).softmax(1)


def temper_network(network: Network, labels: Tensor) -> tuple[Network, float]:
    """Gives a network, or the mean of an ensemble, the temperature that validation data choose; returns that too."""
    temperature = choose_temperature(network["validation"][0], labels)
    tempered = {part: temper(probs, temperature) for part, (probs, _) in network.items()}
    return {part: (probs, entropy(probs)) for part, probs in tempered.items()}, temperature


def choose_spread(losses: Mapping[float, Tensor]) -> float:
    """Returns the spread that is nearest to the fitted one, 1, among those within one standard error of the best.

    So the fitted one stands unless another is better by more than one standard error of their paired difference. Losses
    are those of each validation input, (N,).

    Examples:
        >>> import torch
        >>> noise = torch.tensor([0.1, -0.1, 0.1, -0.1])
        >>> choose_spread({1.0: 0.5 + noise, 2.0: 0.49 - noise}), choose_spread({1.0: 0.5 + noise, 2.0: 0.3 - noise})
        (1.0, 2.0)
    """
    return list(losses)[choose_nearest(torch.stack(list(losses.values())), [abs(math.log(one)) for one in losses])]
