"""Predictions and labels → scores with 95 % intervals, and paired differences. Pure functions.

Every score is a function of sums over inputs, so that resampling inputs costs sums alone: an input has a row of
numbers, and a score is computed from the mean row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stochbn.curves import Z, find_share, outcomes, uncertainties, wilson
from stochbn.inference.held_out import like_outputs
from stochbn.inference.prediction import Prediction
from stochbn.uncertainty import bin_of, class_indices

NUM_RESAMPLES = 500
NUM_BINS = 15  # of confidence, as in `stochbn.ece`
PERCENT = ("error_percent", "coverage_percent")


@dataclass(frozen=True)
class Metric:
    """A column of the table: its label, digits, and what it means."""

    label: str
    digits: int
    meaning: str


METRICS = {
    "error_percent": Metric("Error, %", 2, "share of wrong classes; of labels or pixels where an input has several"),
    "rmse": Metric("RMSE", 4, "root of the mean squared error"),
    "nll": Metric("NLL", 4, "mean −log p(y | x) in nats: the sum over labels, the mean over pixels; lower is better"),
    "brier": Metric("Brier", 4, "mean squared distance of probabilities to the truth; lower is better"),
    "ece_percent": Metric(
        "ECE, %", 2, "|accuracy − confidence| in 15 equal bins, by their size; chance alone adds to it"
    ),
    "coverage_percent": Metric("In 95 % intervals, %", 1, "share of labels within 1.96 standard deviations"),
    "auroc": Metric("AUROC", 4, "how often an out-of-domain input is more uncertain than a known one"),
}


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; NaN at both ends where none is known, as of an ECE."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is more than chance would make."""
        return self.low > 0 or self.high < 0


def losses(pred: Prediction, labels: Tensor) -> Tensor | None:
    """Returns −log p(y | x) of each input, (N,), as `tune` has it; None for a regression without a noise level."""
    if pred.link == "identity":
        if pred.noise is None:
            return None
        law = torch.distributions.Normal(pred.mean.double(), pred.total_std.double())
        each = -law.log_prob(like_outputs(labels, pred.mean, pred.link).double())
    elif pred.link == "sigmoid":
        labels = like_outputs(labels, pred.probs, pred.link)
        right = torch.where(labels > 0, pred.probs, 1 - pred.probs)
        each = -right.clamp_min(torch.finfo(right.dtype).tiny).log().double()
    else:
        right = pred.probs.gather(1, class_indices(pred.probs, labels)).squeeze(1)
        each = -right.clamp_min(torch.finfo(right.dtype).tiny).log().double()
        return each.reshape(len(each), -1).mean(1)
    total: Tensor = each.flatten(2).mean(2).sum(1) if each.dim() > 2 else each.sum(1)
    return total


def describe_inputs(pred: Prediction, labels: Tensor) -> dict[str, Tensor]:
    """Returns the rows of numbers that each score needs, (N, D) in float64, by the score's name."""
    rows: dict[str, Tensor] = {}
    if pred.link == "identity":
        truth = like_outputs(labels, pred.mean, pred.link)
        distance = (truth - pred.mean).double().flatten(1)
        rows["rmse"] = distance.square().mean(1, keepdim=True)
        if pred.noise is not None:
            inside = distance.abs() <= Z * pred.total_std.flatten(1).double()
            rows["coverage_percent"] = inside.double().mean(1, keepdim=True)
    else:
        confidence, correct = outcomes(pred, labels)
        rows["error_percent"] = (~correct).double().mean(1, keepdim=True)
        truth = (
            like_outputs(labels, pred.probs, pred.link).double()
            if pred.link == "sigmoid"
            else torch.zeros_like(pred.probs).scatter(1, class_indices(pred.probs, labels), 1.0).double()
        )
        squares = (pred.probs.double() - truth).square().sum(1)
        rows["brier"] = squares.reshape(len(squares), -1).mean(1, keepdim=True)
        bins = bin_of(confidence, NUM_BINS)
        gaps = torch.zeros(len(bins), NUM_BINS, dtype=torch.float64)
        rows["ece_percent"] = gaps.scatter_add(1, bins, correct.double() - confidence.double()) / bins.shape[1]
    found = losses(pred, labels)
    if found is not None:
        rows["nll"] = found.unsqueeze(1)
    return {key: rows[key] for key in METRICS if key in rows}


def rank(known: Prediction, other: Prediction) -> tuple[Tensor, Tensor]:
    """Returns the share of others that each known input is below, (N,), and of known that each other is above, (M,).

    The mean of either is the AUROC; equal uncertainties count half.
    """
    a, b = uncertainties(known), uncertainties(other)

    def below(values: Tensor, among: Tensor) -> Tensor:
        ordered = among.sort().values
        places = [torch.searchsorted(ordered, values, side=side).double() for side in ("left", "right")]
        return (places[0] + places[1]) / (2 * len(among))

    return 1 - below(a, b), below(b, a)


def finish(name: str, means: Tensor) -> Tensor:
    """Returns a score from mean rows (…, D)."""
    if name == "rmse":
        return means[..., 0].sqrt()
    if name == "ece_percent":
        return 100 * means.abs().sum(-1)
    return means[..., 0] * (100 if name in PERCENT else 1)


class Resampled:
    """Scores of several methods on the same inputs, and on resamples of these, the same for all methods."""

    def __init__(
        self,
        predictions: Mapping[str, Prediction],
        labels: Tensor,
        others: Mapping[str, Prediction] | None = None,
        seed: int = 0,
    ) -> None:
        self._num_places = labels[0].numel()
        self._rows = {key: describe_inputs(pred, labels) for key, pred in predictions.items()}
        self.values = {
            key: {name: float(finish(name, columns.mean(0))) for name, columns in rows.items()}
            for key, rows in self._rows.items()
        }
        self._trials: dict[str, float] = {}
        draw = _make_resampler(len(labels), seed)
        self._varied = {
            key: {name: finish(name, draw(columns)) for name, columns in rows.items()}
            for key, rows in self._rows.items()
        }
        if others:
            draw_other = _make_resampler(len(next(iter(others.values()))), seed + 1)
            for key, pred in predictions.items():
                if pred.link == "identity" and pred.num_samples == 1:
                    continue  # one pass is not uncertain of anything
                known, other = rank(pred, others[key])
                area = float(known.mean())
                self.values[key]["auroc"] = area
                # To first order in the weights of inputs: DeLong's variance.
                parts = draw(known.unsqueeze(1)) + draw_other(other.unsqueeze(1))
                self._varied[key]["auroc"] = parts[:, 0] - area
                self._trials[key] = _count_trials(known, other)

    def estimate(self, key: str) -> dict[str, Estimate]:
        """Returns a method's scores with their intervals, by name."""
        found = {}
        for name, value in self.values[key].items():
            if name in PERCENT:  # a share may be 0, where resampling has nothing to vary
                shares = self._rows[key][name]
                counts = torch.full_like(shares, self._num_places)
                share = find_share(shares.mean(0), shares * counts, counts)
                found[name] = Estimate(value, 100 * float(share.low), 100 * float(share.high))
            elif name == "auroc":
                low, high = wilson(torch.tensor(value, dtype=torch.float64), torch.tensor(self._trials[key]))
                found[name] = Estimate(value, float(low), float(high))
            elif name == "ece_percent":
                found[name] = Estimate(value, math.nan, math.nan)
            else:
                found[name] = _mirror(value, self._varied[key][name])
                if name != "nll" or "error_percent" in self._rows[key]:  # a density may have a negative one
                    found[name] = replace(found[name], low=max(found[name].low, 0.0))
        return {name: found[name] for name in METRICS if name in found}

    def compare(self, key: str, reference: str) -> dict[str, Estimate]:
        """Returns by how much a method scores above another, by name, with intervals of the paired difference."""
        ours, theirs = self.values[key], self.values[reference]
        found = {
            name: _mirror(ours[name] - theirs[name], self._varied[key][name] - self._varied[reference][name])
            for name in METRICS
            if name in ours and name in theirs
        }
        if "ece_percent" in found:
            found["ece_percent"] = replace(found["ece_percent"], low=math.nan, high=math.nan)
        return found


def _count_trials(known: Tensor, other: Tensor) -> float:
    """Returns how many independent trials a share would need to vary as much as an AUROC, by DeLong's variance.

    Where all inputs are ranked right nothing varies. So there are never more than at an AUROC of ½, where ranks are
    uniform and have a variance of 1/12.
    """
    area, count, others = float(known.mean()), len(known), len(other)
    most = 3 / (1 / count + 1 / others)
    variance = float(known.var(correction=0)) / count + float(other.var(correction=0)) / others
    return min(area * (1 - area) / variance, most) if variance > 0 else most


def _make_resampler(count: int, seed: int) -> Callable[[Tensor], Tensor]:
    """Returns a function (N, D) → (R, D), the means over resamples of the inputs: the same ones at every call."""

    def draw(columns: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        each = (torch.randint(count, (count,), generator=generator) for _ in range(NUM_RESAMPLES))
        return torch.stack([columns[index].mean(0) for index in each])

    return draw


def _mirror(value: float, varied: Tensor) -> Estimate:
    """Returns the interval that is mirrored around the value ("basic")."""
    low, high = varied.quantile(torch.tensor([0.025, 0.975], dtype=varied.dtype)).tolist()
    # The value itself is never implausible.
    return Estimate(value, min(2 * value - high, value), max(2 * value - low, value))
