"""Two methods on the same inputs → by how much their scores differ, with 95 % intervals. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stochbn.experiments.files import PARTS
from stochbn.experiments.report.scores import NUM_BINS, Output, Ranking, Scored, find_bins, log_loss, mean_scores

NUM_RESAMPLES = 500


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    difference: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the two differ by more than chance would make them."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Difference:
    """By how much the first method, by its key, scores above the second, by metric."""

    first: str
    second: str
    scores: dict[str, Interval]


def compare(
    methods: Mapping[str, Scored], labels: Tensor, pairs: Sequence[tuple[str, str]], num_resamples: int = NUM_RESAMPLES
) -> list[Difference]:
    """Returns by how much the first method of each pair scores above the second, with 95 % intervals.

    A paired bootstrap: images are drawn with replacement, and so are the n networks that a method is scored on one by
    one (n − 1 at a time, which gives their mean its variance), the same for all methods. An ensemble stays the one that
    it is: the intervals are those of other images and other single networks, given this ensemble. They are mirrored
    around the difference ("basic"), as resampling adds to scores such as the ECE what it must not add to the interval.

    Args:
        methods: By key. Each is scored on the same n networks in the same order, or is one ensemble.
        labels: Of the test data, (N,).
        pairs: Keys of methods.
        num_resamples: How often images and networks are drawn.
    """
    generator = np.random.default_rng(0)
    used = sorted({key for pair in pairs for key in pair})
    if not used:
        return []
    counts = {part: len(output.probs) for part, output in methods[used[0]].outputs[0].items()}
    num_networks = max(len(methods[key].outputs) for key in used)
    if any(len(methods[key].outputs) not in (1, num_networks) for key in used):
        raise ValueError(f"Expected methods with the same networks, got {used}. Compare those alone that have all.")
    prepared = {key: [_Prepared(output, labels) for output in methods[key].outputs] for key in used}
    once = {part: np.ones(count, dtype=np.int64) for part, count in counts.items()}
    scores = {key: [mean_scores([output.score(once) for output in prepared[key]])] for key in used}
    for _ in range(num_resamples):
        drawn = {part: np.bincount(generator.integers(n, size=n), minlength=n) for part, n in counts.items()}
        networks = generator.integers(num_networks, size=max(1, num_networks - 1))
        for key in used:
            each = [output.score(drawn) for output in prepared[key]]
            scores[key].append(mean_scores(each if len(each) == 1 else [each[i] for i in networks]))
    return [Difference(first, second, _find_intervals(scores[first], scores[second])) for first, second in pairs]


def _find_intervals(first: Sequence[dict[str, float]], second: Sequence[dict[str, float]]) -> dict[str, Interval]:
    """Compares two lists of scores: on the inputs as they are, then on resamples of them."""
    intervals = {}
    for key in first[0]:
        difference, *varied = (a[key] - b[key] for a, b in zip(first, second, strict=True))
        low, high = np.percentile(varied, [2.5, 97.5])
        intervals[key] = Interval(difference, float(2 * difference - high), float(2 * difference - low))
    return intervals


class _Prepared:
    """What the scores of one network need, sorted and binned once, so that a resample costs sums alone."""

    def __init__(self, output: Mapping[str, Output], labels: Tensor) -> None:
        probs = output["test"].probs.double()
        confidence, predicted = probs.max(1)
        correct = (predicted == labels).double()
        shares = probs.clone()
        shares[range(len(labels)), labels] -= 1
        self.losses = {
            "error_percent": 100 * (1 - correct).numpy(),
            "nll": log_loss(probs, labels).numpy(),
            "brier": shares.square().sum(1).numpy(),
        }
        self.bins = find_bins(confidence.numpy())
        self.gaps = (confidence - correct).numpy()
        other = output.get("out-of-domain")
        self.ranking = None if other is None else Ranking(output["test"].entropy, other.entropy)

    def score(self, counts: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
        """Returns the scores on inputs of each part that count so often."""
        known = counts["test"]
        scores = {key: float(known @ loss / known.sum()) for key, loss in self.losses.items()}
        gaps = np.bincount(self.bins, weights=known * self.gaps, minlength=NUM_BINS)
        scores["ece"] = float(np.abs(gaps).sum() / known.sum())
        if self.ranking is not None:
            found = self.ranking.score(np.concatenate([counts[part] for part in PARTS]))
            scores |= {f"{key}_entropy": value for key, value in found.items()}
        return scores
