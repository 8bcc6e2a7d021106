"""Predictions → every number of the report. Pure functions.

A method that needs one network is scored on each seed's: the mean, ± the standard deviation over seeds. Deep Ensembles
are one ensemble of all plain networks: its score, ± the standard deviation over the ensembles that leave one out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stochbn.experiments.files import PARTS
from stochbn.experiments.methods import Method
from stochbn.uncertainty import brier, ece, entropy, error, nll

Values = NDArray[np.float64]
NUM_BINS = 15  # of confidence, as in `stochbn.ece`


@dataclass(frozen=True)
class Metric:
    """A column of the tables: its key in `scores.json`, label, digits, better way, data and definition."""

    key: str
    label: str
    digits: int
    better: Literal["lower", "higher"] | None
    parts: tuple[str, ...]
    meaning: str


_TEST, _OTHER = PARTS[:1], PARTS[1:]
METRICS = (
    Metric("error_percent", "Error, %", 2, "lower", _TEST, "wrong classes on the test data"),
    Metric("nll", "NLL", 4, "lower", _TEST, "mean −log p(y | x) on the test data, in nats"),
    Metric("brier", "Brier", 4, "lower", _TEST, "mean Σ (p − [k = y])² over the classes k, between 0 and 2"),
    Metric("ece", "ECE", 4, "lower", _TEST, "|accuracy − confidence| in 15 equal bins of confidence, by their size"),
    Metric("entropy_test", "Mean entropy, known", 4, None, _TEST, "of the predictive mean on the test data, in nats"),
    Metric(
        "entropy_out_of_domain",
        "Median entropy, out-of-domain",
        3,
        "higher",
        _OTHER,
        "of the predictive mean, out of domain",
    ),
    Metric("auroc_entropy", "AUROC, entropy", 4, "higher", PARTS, "out-of-domain (positive) against known"),
    Metric("aupr_entropy", "AUPR, entropy", 4, "higher", PARTS, "average precision of the same"),
    Metric("fpr95_entropy", "FPR95, entropy", 4, "lower", PARTS, "known share above what 95 % of out-of-domain reach"),
    Metric("auroc_information", "AUROC, mutual information", 4, "higher", PARTS, "by the draws' disagreement"),
    Metric("aupr_information", "AUPR, mutual information", 4, "higher", PARTS, "by the draws' disagreement"),
    Metric("fpr95_information", "FPR95, mutual information", 4, "lower", PARTS, "by the draws' disagreement"),
)


@dataclass(frozen=True)
class Score:
    """A number, its standard deviation where there is one, and the number of inputs behind it."""

    value: float
    std: float | None
    num_inputs: int

    def times(self, factor: float) -> "Score":
        """Returns it in another unit."""
        return Score(factor * self.value, self.std and factor * self.std, self.num_inputs)


Scores = dict[str, dict[str, Score]]  # by the keys of method and metric


@dataclass(frozen=True, eq=False)
class Output:
    """Predictions on one part of the data: probabilities (N, K) and, if there are several draws, their mean entropy."""

    probs: Tensor
    expected_entropy: Tensor | None = None

    @cached_property
    def entropy(self) -> Values:
        """Entropy of each prediction, (N,)."""
        return entropy(self.probs).double().numpy()

    @cached_property
    def information(self) -> Values | None:
        """Mutual information between prediction and draw, (N,); one network alone has none."""
        if self.expected_entropy is None:
            return None
        left: Values = self.entropy - self.expected_entropy.double().numpy()
        return np.maximum(left, 0)


@dataclass(frozen=True)
class Chosen:
    """What validation data chose for each network, and whether one of them is the end of what was tried."""

    values: tuple[float, ...]
    has_end: bool


@dataclass(frozen=True, eq=False)
class Scored:
    """A method and its predictions, which the scores are of."""

    method: Method  # from the table of methods
    seeds: tuple[int, ...]  # of the networks it uses
    outputs: tuple[dict[str, Output], ...]  # by part of the data, one for each network; for an ensemble there is one
    replicas: tuple[dict[str, Output], ...]  # what the ± is the standard deviation over
    std_over: str = ""  # that, in words; empty where there is no ±
    num_wanted: int = 0  # how many networks the experiment has; 0 where that is not known
    # The temperatures or spreads that validation data chose for its networks, or for the ensemble
    chosen: Chosen | None = None

    @property
    def label(self) -> str:
        """Its name in tables, where an ensemble of fewer networks than planned says so."""
        return self.method.label + (f" ({self.count} networks)" if self._is_partial else "")

    @property
    def short_label(self) -> str:
        """The same in figures."""
        return self.method.label + (f" ({self.count})" if self._is_partial else "")

    @property
    def _is_partial(self) -> bool:
        return self.method.members is not None and len(self.seeds) < self.num_wanted

    @property
    def count(self) -> str:
        """The number of its networks, in words."""
        return f"{len(self.seeds)} of {self.num_wanted}" if len(self.seeds) < self.num_wanted else f"{len(self.seeds)}"

    def pooled_entropy(self, part: str) -> Values:
        """Returns the entropies that all its networks give a part of the data, in one array."""
        return np.concatenate([output[part].entropy for output in self.outputs])


@dataclass(frozen=True, eq=False)
class Results:
    """The prediction files of one experiment: their common header, the test labels (N,), and the methods by key."""

    header: dict[str, Any]
    labels: Tensor
    methods: dict[str, Scored]
    has_out_of_domain: bool
    is_undecided: bool = False  # whether validation data have too few mistakes to choose anything


def measure(output: dict[str, Output], labels: Tensor) -> dict[str, float]:
    """Scores one set of predictions: every metric that its parts of the data allow.

    Examples:
        >>> measure({"test": Output(torch.tensor([[0.8, 0.2], [0.8, 0.2]]))}, torch.tensor([0, 1]))["error_percent"]
        50.0
    """
    known, other = output["test"], output.get("out-of-domain")
    scores = {
        "error_percent": 100 * error(known.probs, labels).item(),
        "nll": nll(known.probs, labels).item(),
        "brier": brier(known.probs, labels).item(),
        "ece": ece(known.probs, labels).item(),
        "entropy_test": float(np.mean(known.entropy)),
    }
    if other is not None:
        scores["entropy_out_of_domain"] = float(np.median(other.entropy))
        scores |= {f"{name}_entropy": score for name, score in detect(known.entropy, other.entropy).items()}
        if known.information is not None and other.information is not None:
            found = detect(known.information, other.information)
            scores |= {f"{name}_information": score for name, score in found.items()}
    return scores


class Ranking:
    """Known (N,) and out-of-domain inputs (M,), the positive class, by an uncertainty: sorted once, scored often."""

    def __init__(self, known: Values, other: Values) -> None:
        values = np.concatenate([known, other])
        self._order = np.argsort(-values, kind="stable")
        self._is_other = self._order >= len(known)
        # The last of each run of equal values: no threshold lies between them.
        self._ends = np.flatnonzero(np.diff(values[self._order], append=-np.inf))

    def score(self, counts: NDArray[np.int64] | None = None) -> dict[str, float]:
        """Returns AUROC, AUPR (average precision) and FPR95, of inputs that count once, or as often as is given.

        FPR95 is the share of known inputs at or above the highest threshold that at least 95 % of the others reach.
        Counts (N + M,) are of the known inputs, then of the others.
        """
        ordered = np.ones_like(self._order) if counts is None else counts[self._order]
        other, known = (
            np.concatenate([[0], np.cumsum(np.where(chosen, ordered, 0))[self._ends]])  # above each threshold
            for chosen in (self._is_other, ~self._is_other)
        )
        num_other, num_known = int(other[-1]), int(known[-1])
        area = np.diff(known) @ (other[1:] + other[:-1]) / 2  # by trapezoids: equal values are half in order
        precision = other[1:] / np.maximum(other[1:] + known[1:], 1)
        reached = np.argmax(other >= num_other - num_other * 5 // 100)  # ⌈0.95 n⌉, in whole numbers
        return {
            "auroc": float(area / (num_other * num_known)),
            "aupr": float(np.diff(other) @ precision / num_other),
            "fpr95": float(known[reached] / num_known),
        }


def detect(known: Values, other: Values) -> dict[str, float]:
    """Scores how well an uncertainty distinguishes out-of-domain inputs, the positive class, from known ones.

    Examples:
        >>> detect(np.array([0.1, 0.2, 0.5]), np.array([0.4, 0.9]))["fpr95"]
        0.3333333333333333
    """
    return Ranking(known, other).score()


def find_bins(confidence: Values) -> NDArray[np.int64]:
    """Returns which of 15 equal bins each confidence lies in, as `stochbn.ece` has them: 1 is in the last.

    Examples:
        >>> find_bins(np.array([0.05, 0.1, 1.0]))
        array([ 0,  1, 14])
    """
    return np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)


def log_loss(probs: Tensor, labels: Tensor) -> Tensor:
    """Returns −log p(y | x) of each input, (N,)."""
    return -probs.gather(1, labels[:, None])[:, 0].clamp_min(torch.finfo(probs.dtype).tiny).log()


def score(results: Results) -> Scores:
    """Scores every method: by its key and the metric's. A metric that has no meaning for a method is left out."""
    return {key: score_method(scored, results.labels) for key, scored in results.methods.items()}


def score_method(scored: Scored, labels: Tensor) -> dict[str, Score]:
    """Scores one method, by the metric's key."""
    found = [measure(output, labels) for output in scored.outputs]
    varied = found if scored.replicas is scored.outputs else [measure(output, labels) for output in scored.replicas]
    counts, means = {part: len(output.probs) for part, output in scored.outputs[0].items()}, mean_scores(found)
    return {
        metric.key: Score(
            means[metric.key],
            float(np.std([scores[metric.key] for scores in varied], ddof=1)) if len(varied) > 1 else None,
            sum(counts[part] for part in metric.parts),
        )
        for metric in METRICS
        if metric.key in means
    }


def mean_scores(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each score, over networks or kinds of data."""
    return {key: float(np.mean([scores[key] for scores in each])) for key in each[0]}


def ecdf(values: Values, thresholds: Values) -> Values:
    """Returns the share of values at or below each threshold.

    Examples:
        >>> ecdf(np.array([1.0, 2.0]), np.array([0.5, 1.0, 3.0]))
        array([0. , 0.5, 1. ])
    """
    return np.searchsorted(np.sort(values), thresholds, side="right") / len(values)
