"""Predictions and labels → the points of the usual curves, with intervals. Pure functions; `plots` draws them.

Places of one input, such as its pixels or labels, do not err independently. So intervals count inputs: a share over
inputs with several places each has the variance of a ratio of sums over inputs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stochbn.inference.held_out import like_outputs
from stochbn.inference.prediction import Prediction
from stochbn.uncertainty import bin_of, class_indices, entropy, risk_by_coverage

Z = 1.959964  # of a normal distribution, 95 % lie within


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares by bin or level, (B,) in float64 each, with 95 % intervals; NaN where a bin is empty.

    Attributes:
        predicted: What the prediction says: the mean confidence, or the level of an interval.
        observed: The share of correct predictions, or of labels inside the interval.
        low: Of the interval of `observed`.
        high: Of the same.
        count: Places, which are inputs where each has one.
    """

    predicted: Tensor
    observed: Tensor
    low: Tensor
    high: Tensor
    count: Tensor


def wilson(share: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Wilson's 95 % interval of a share of `count` trials, which need not be a whole number.

    Examples:
        >>> low, high = wilson(torch.tensor(1.0), torch.tensor(10.0))
        >>> round(low.item(), 3), round(high.item(), 3)
        (0.722, 1.0)
    """
    scale = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / scale
    half = Z / scale * (share * (1 - share) / count + Z**2 / (4 * count**2)).clamp_min(0).sqrt()
    return torch.minimum(middle - half, share).clamp_min(0), torch.maximum(middle + half, share).clamp_max(1)


def outcomes(pred: Prediction | Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how sure a prediction is of each place of an input and whether it is right there: (N, P) both.

    Of probabilities (N, K, *), or a prediction of classes or labels.
    """
    if isinstance(pred, Prediction):
        confidence, classes, probs = pred.confidence, pred.classes, pred.probs
        labels = labels.to(probs.device)
        if pred.link == "sigmoid":
            labels = like_outputs(labels, probs, pred.link)
            count = len(probs)  # outputs may be (N,)
            return confidence.reshape(count, -1).detach(), (classes == labels).reshape(count, -1)
    else:
        probs, labels = pred, labels.to(pred.device)
        confidence, classes = probs.max(1)
    class_indices(probs, labels)
    return confidence.reshape(len(probs), -1).detach(), (classes == labels).reshape(len(probs), -1)


def bin_confidence(pred: Prediction | Tensor, labels: Tensor, num_bins: int = 15) -> Shares:
    """Returns accuracy by confidence, in the equal bins of `stochbn.ece`.

    Examples:
        >>> shares = bin_confidence(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
        >>> shares.predicted[11].item(), shares.observed[11].item(), shares.count[11].item()
        (0.75, 0.5, 2.0)
    """
    confidence, correct = outcomes(pred, labels)
    places = bin_of(confidence, num_bins)

    def add(values: Tensor) -> Tensor:
        empty = torch.zeros(len(values), num_bins, dtype=torch.float64, device=values.device)
        return empty.scatter_add(1, places, values.double())  # (N, B)

    counts = add(torch.ones_like(confidence))
    predicted = add(confidence).sum(0) / counts.sum(0)
    return find_share(predicted, add(correct), counts)


def cover(pred: Prediction, labels: Tensor, num_levels: int = 15) -> Shares:
    """Returns how many labels of a regression lie in its central intervals of 1/B, 2/B, …, nearly 1 of probability."""
    levels = torch.arange(1, num_levels + 1, dtype=torch.float64, device=pred.mean.device) / num_levels
    levels[-1] = 1 - 0.5 / num_levels  # as all of the line would be no statement
    within = torch.special.ndtri((levels + 1) / 2)  # standard deviations
    labels = like_outputs(labels.to(pred.mean.device), pred.mean, pred.link)
    distance = ((labels - pred.mean).abs() / pred.total_std).reshape(len(labels), -1).double()  # (N, P)
    inside = (distance.unsqueeze(2) <= within).double().sum(1)  # (N, B)
    return find_share(levels, inside, torch.full_like(inside, distance.shape[1]))


def find_share(predicted: Tensor, hits: Tensor, counts: Tensor) -> Shares:
    """Returns the share of hits among counts, both (N, B), with intervals for inputs that vary as a whole."""
    total, num_inputs = counts.sum(0), (counts > 0).sum(0)
    share = hits.sum(0) / total
    variance = (hits - share * counts).square().sum(0) / total.square()
    # As many independent trials would vary as much: all places if they are independent, as few as inputs if not. Of
    # shares of 0 and 1 nothing varies, and inputs are what is sure to be independent.
    trials = torch.where(variance > 0, share * (1 - share) / variance, num_inputs)
    low, high = wilson(share, torch.minimum(trials, total))
    return Shares(*(values.cpu() for values in (predicted, share, low, high, total)))


def risks(pred: Prediction | Tensor, labels: Tensor, by: str = "entropy") -> tuple[Tensor, Tensor]:
    """Returns the shares 1/n, 2/n, …, 1 of the most certain places, and the risk among each, (n,) in float64.

    The risk is the share of errors, as `stochbn.aurc` averages it; of a regression the root of the mean squared error,
    and the order is that of `std`. Equally certain places count as in random order.

    Examples:
        >>> coverage, risk = risks(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> coverage.tolist(), risk.tolist()
        ([0.5, 1.0], [0.0, 0.5])
    """
    is_regression = isinstance(pred, Prediction) and pred.link == "identity"
    if is_regression:
        assert isinstance(pred, Prediction)
        labels = like_outputs(labels.to(pred.mean.device), pred.mean, pred.link)
        losses, uncertainty = (labels - pred.mean).square(), pred.std
    else:
        losses = (~outcomes(pred, labels)[1]).double()
        uncertainty = getattr(pred, by) if isinstance(pred, Prediction) else entropy(pred)
        uncertainty = -uncertainty if by == "confidence" else uncertainty
    found = risk_by_coverage(losses.detach().double().flatten(), uncertainty.detach().flatten()).cpu()
    coverage = torch.arange(1, len(found) + 1, dtype=torch.float64) / len(found)
    return coverage, found.sqrt() if is_regression else found


def uncertainties(pred: Prediction | Tensor) -> Tensor:
    """Returns one uncertainty for each input, (N,) in float64: the mean entropy of its places; of a regression `std`.

    A tensor is taken for such values.
    """
    values = pred if isinstance(pred, Tensor) else pred.std if pred.link == "identity" else pred.entropy
    return values.detach().double().cpu().reshape(len(values), -1).mean(1)


def density(values: Tensor, points: Tensor) -> Tensor:
    """Returns a kernel density estimate at some points: a Gaussian on every value, as wide as Scott's rule says.

    Examples:
        >>> round(density(torch.tensor([-1.0, 1.0]), torch.tensor([0.0])).item(), 4)
        0.233
    """
    values, points = values.double(), points.double()
    width = values.std() * len(values) ** -0.2
    squares = ((points.unsqueeze(1) - values) / width).square()
    heights: Tensor = (-squares / 2).exp().mean(1) / (width * math.sqrt(2 * math.pi))
    return heights
