"""Predictions on held-out data → rules that keep a promise: when to abstain, and what to flag.

A rule compares one score of each input with a threshold. Scores are higher the more uncertain an input is: `by` names
a property of `Prediction`, and "confidence" stands for 1 − confidence. Where a score has several values for an input,
such as one for each label or pixel, the largest counts.

Promises are about inputs like those of the held-out data, predicted in the same way: same model, statistics and number
of draws. Data that training or `tune` has seen are not held out.
"""

import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from stochbn.distributions.storage import write_atomically
from stochbn.inference.prediction import Link, Prediction
from stochbn.statistics.checks import listing
from stochbn.uncertainty import class_indices

By = Literal["entropy", "aleatoric", "epistemic", "confidence", "std"]
FORMAT_VERSION = 1


@dataclass(frozen=True)
class _Rule:
    """What rules have in common: the score, the threshold, and what predictions they were made from."""

    by: By
    threshold: float
    link: Link
    num_outputs: int
    num_inputs: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rule to a JSON file, whole or not at all; `stochbn.load_rule` reads it."""
        values = asdict(self)
        if math.isinf(self.threshold):
            values["threshold"] = str(self.threshold)  # JSON has no infinity
        header = {"stochbn": type(self).__name__, "format_version": FORMAT_VERSION}
        write_atomically(path, (json.dumps(header | values, indent=2) + "\n").encode())

    def _scores(self, pred: Prediction) -> Tensor:
        scores = score(pred, self.by)
        if (pred.link, _num_outputs(pred)) != (self.link, self.num_outputs):
            raise ValueError(
                f"Expected a prediction of {self.num_outputs} outputs with link {self.link!r}, as the rule was made "
                f"from, got {_num_outputs(pred)} with {pred.link!r}. Make a rule for these."
            )
        return scores


def _num_outputs(pred: Prediction) -> int:
    return pred.mean.shape[1] if pred.mean.dim() > 1 else 1


@dataclass(frozen=True)
class AbstainRule(_Rule):
    """Accepts inputs that the network is certain enough about; `stochbn.abstain` makes it.

    `rule(pred)` is the mask (N,) of accepted inputs, whose score is below `threshold`. On the rest, abstain.

    Attributes:
        by: The score.
        threshold: Accepted scores are below it: inf accepts all inputs, −inf none.
        link: Of the predictions that the rule is for.
        num_outputs: K, their classes.
        num_inputs: N of the held-out data.
        risk: What is promised: the probability of an error among accepted inputs is at most this.
        confidence: How probable it is that held-out data give a rule that keeps the promise.
        bound: Upper bound on that probability, with the same confidence, at most `risk`; 1 if nothing is accepted.
        num_accepted: Of the held-out inputs.
        num_errors: Among those.
    """

    risk: float
    confidence: float
    bound: float
    num_accepted: int
    num_errors: int

    @property
    def coverage(self) -> float:
        """The share of held-out inputs that were accepted."""
        return self.num_accepted / self.num_inputs

    @property
    def error(self) -> float:
        """The share of errors among those; NaN if there are none."""
        return self.num_errors / self.num_accepted if self.num_accepted else math.nan

    def __call__(self, pred: Prediction) -> Tensor:
        """Returns which inputs to accept, (N,) bool."""
        return self._scores(pred) < self.threshold


@dataclass(frozen=True)
class FlagRule(_Rule):
    """Flags inputs that are more uncertain than nearly all held-out ones; `stochbn.flag` makes it.

    `rule(pred)` is the mask (N,) of flagged inputs, whose score is above `threshold`.

    Attributes:
        by: The score.
        threshold: Flagged scores are above it.
        link: Of the predictions that the rule is for.
        num_outputs: K of their mean, (N, K, *).
        num_inputs: N of the held-out data.
        false_alarms: What is promised: inputs like the held-out ones are flagged with this probability at most.
    """

    false_alarms: float

    def __call__(self, pred: Prediction) -> Tensor:
        """Returns which inputs to flag, (N,) bool."""
        return self._scores(pred) > self.threshold


def abstain(
    pred: Prediction, labels: Tensor, risk: float = 0.01, confidence: float = 0.95, by: By = "entropy"
) -> AbstainRule:
    """Finds how uncertain an input may be, so that errors among accepted inputs are as rare as promised.

    With probability `confidence` over the held-out data, P(error | accepted) ≤ `risk`. Of the thresholds that are
    shown to keep it, the one that accepts the most is taken; where there is none, the rule accepts nothing and a
    warning says so.

    Thresholds that accept N, N / s, N / s², … of the held-out inputs are tried, m in all, down to where even no error
    would prove nothing. These numbers follow from N, `risk` and `confidence` alone. A threshold is the score of the
    next input, and accepts those strictly below it. Given that score and their number k, they are k independent inputs
    of those that the rule accepts, with ties or without. So their errors are binomial, and the Clopper–Pearson bound at
    level (1 − confidence) / m is exact; by the union bound all m hold at once, whichever is chosen.

    This is Learn then Test (Angelopoulos et al., arXiv:2110.01052) for the problem of SGR (Geifman and El-Yaniv,
    arXiv:1705.08500). SGR's binary search moves by the errors that it sees, so its thresholds are not fixed beforehand.
    Fixed-sequence testing spends the whole level on the few most certain inputs, where one mistake stops it; its bound
    would not hold for the chosen threshold, only `risk`. Bonferroni's correction has neither weakness.

    Args:
        pred: Of held-out inputs, one class each; the order does not matter.
        labels: (N,) their classes.
        risk: The error rate to stay below, among accepted inputs.
        confidence: At least 0.5.
        by: The score: "entropy", "aleatoric", "epistemic", "confidence" or "std".

    Examples:
        >>> import stochbn, torch
        >>> x = torch.randn(2000, 1)
        >>> labels = (x + 0.3 * torch.randn(2000, 1) > 0).long().squeeze(1)
        >>> model = torch.nn.Linear(1, 2)
        >>> _ = model.weight.data.copy_(torch.tensor([[-2.0], [2.0]])), model.bias.data.zero_()
        >>> rule = stochbn.abstain(stochbn.predict(model, None, x), labels, risk=0.05)
        >>> rule.bound <= 0.05, rule.coverage > 0.5
        (True, True)
        >>> rule(stochbn.predict(model, None, torch.tensor([[3.0], [0.001]])))
        tensor([ True, False])
    """
    scores = score(pred, by)
    if pred.link != "softmax" or pred.mean.dim() != 2:
        raise ValueError(
            f"Expected one class for each input, probs (N, K) with link 'softmax', got {tuple(pred.mean.shape)} with "
            f"{pred.link!r}: pixels and labels of one input do not err independently. stochbn.flag takes those."
        )
    labels = labels.to(pred.mean.device)
    class_indices(pred.mean, labels)
    risk, confidence = _check_share("risk", risk, 0.01), _check_share("confidence", confidence, 0.95, 0.5)
    if len(scores) > 1 and bool((labels == labels[0]).all()):
        warnings.warn(
            f"All {len(labels)} labels are {int(labels[0])}, and the promise is for such inputs alone. Pass held-out "
            "data as varied as what the rule is to meet.",
            stacklevel=2,
        )
    found = _search(scores, pred.classes != labels, risk, 1 - confidence)
    return AbstainRule(by, found[0], pred.link, _num_outputs(pred), len(scores), risk, confidence, *found[1:])


def flag(pred: Prediction, false_alarms: float = 0.05, by: By = "epistemic") -> FlagRule:
    """Finds how uncertain an input has to be to be flagged, so that false alarms are as rare as promised.

    An input like the held-out ones is flagged with probability `false_alarms` at most. The threshold is the
    ⌈(N + 1)(1 − false_alarms)⌉-th smallest held-out score, of split conformal prediction (Vovk et al., 2005; for
    outliers Bates et al., arXiv:2104.08279). No labels are needed, and ties make alarms rarer. How many
    out-of-domain inputs are found is not promised.

    The promise is over held-out data and the new input together. With one set of N held-out inputs the rate varies
    around it, with a standard deviation of about √(false_alarms / N).

    Args:
        pred: Of held-out inputs, with any link.
        false_alarms: The rate to stay below.
        by: The score: "epistemic", "entropy", "aleatoric", "confidence" or "std". For regression it is "std".

    Examples:
        >>> import stochbn, torch
        >>> model = torch.nn.Linear(2, 3)
        >>> pred = stochbn.predict(model, None, torch.randn(99, 2))
        >>> rule = stochbn.flag(pred, false_alarms=0.1, by="entropy")
        >>> int(rule(pred).sum())
        9
    """
    scores = score(pred, by)
    false_alarms = _check_share("false_alarms", false_alarms, 0.05)
    share = Fraction(str(false_alarms))  # as written: in floating point 0.29 · 100 is below 29
    num_above = math.floor(share * (len(scores) + 1))
    if num_above < 1:
        raise ValueError(
            f"Expected at least {math.ceil(1 / share) - 1} held-out inputs to promise a rate of {false_alarms}, got "
            f"{len(scores)}: fewer promise nothing. Pass more, or a rate of {1 / (len(scores) + 1):.2g} or higher."
        )
    threshold = float(scores.sort().values[len(scores) - num_above])
    return FlagRule(by, threshold, pred.link, _num_outputs(pred), len(scores), false_alarms)


def load_rule(path: str | os.PathLike[str]) -> AbstainRule | FlagRule:
    """Reads a rule that `rule.save(path)` wrote, and checks all of it before use.

    Raises:
        ValueError: The file is not a rule, of another format version, or holds impossible numbers.

    Examples:
        >>> import stochbn, tempfile, torch
        >>> rule = stochbn.flag(stochbn.predict(torch.nn.Linear(2, 3), None, torch.randn(99, 2)), by="entropy")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rule.save(f"{folder}/flag.json")
        ...     stochbn.load_rule(f"{folder}/flag.json") == rule
        True
    """
    try:
        values = json.loads(Path(path).read_bytes())
        kind, version = values.pop("stochbn"), values.pop("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"format {version!r} where {FORMAT_VERSION} is known")
        if kind == "AbstainRule":
            return _parse(AbstainRule, values)
        if kind == "FlagRule":
            return _parse(FlagRule, values)
        raise ValueError(f"a rule of unknown kind {kind!r}")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"Expected a file written by rule.save, got {path}: {reason}. Save it again.") from error


def score(pred: Prediction, by: By) -> Tensor:
    """Returns one uncertainty for each input, (N,) in float64; the largest where a prediction has several."""
    if not isinstance(pred, Prediction):
        raise TypeError(f"Expected a Prediction, got {type(pred).__name__}. Pass what stochbn.predict returns.")
    if by not in get_args(By):
        raise ValueError(f"Expected by to be one of {listing(get_args(By))}, got {by!r}.")
    if pred.link == "identity" and by != "std":
        raise ValueError(f"Expected by='std' for raw outputs (link 'identity'), got {by!r}. Pass by='std'.")
    if pred.num_samples == 1 and by in ("epistemic", "std"):
        raise ValueError(
            f"Expected several draws for by={by!r}, got 1, which disagrees with nothing. Predict with statistics from "
            "stochbn.fit and more draws."
        )
    values: Tensor = getattr(pred, by).detach().double()
    if not values.isfinite().all():
        raise ValueError(f"Expected finite values of {by}, got NaN or Inf. Check the prediction.")
    if by == "confidence":
        values = 1 - values
    return values if values.dim() == 1 else values.flatten(1).amax(1)


def clopper_pearson(num_errors: int, num_inputs: int, level: float) -> float:
    """Returns the exact upper bound on a probability: at it, so few errors or fewer have probability `level`.

    Examples:
        >>> round(clopper_pearson(0, 299, 0.05), 4)
        0.01
    """
    if num_errors >= num_inputs:
        return 1.0
    low, high = num_errors / num_inputs, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no number is between them
        if _log_tail(num_errors, num_inputs, middle) > math.log(level):
            low = middle
        else:
            high = middle
    return high


def _log_tail(num_errors: int, num_inputs: int, p: float) -> float:
    """Returns log P(X ≤ num_errors) of a binomial X, as log P(X = num_errors) and a sum relative to that."""
    k, n = num_errors, num_inputs
    first = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    )
    total, term = 0.0, 1.0
    for i in range(k, -1, -1):
        total += term
        term *= i / (n - i + 1) * (1 - p) / p
        if term < 1e-17 * total:  # p is above k / n, so terms fall, faster and faster
            break
    return first + math.log(total)


def _search(scores: Tensor, wrong: Tensor, risk: float, miss: float) -> tuple[float, float, int, int]:
    """Returns the threshold, its bound, and how many inputs are below it and wrong."""
    num_inputs = len(scores)
    # Finer steps come nearer to the best coverage, but share the level among more. N · risk errors are known to a
    # relative 1 / √(N · risk), so steps much finer than that tell nothing apart.
    step = 1 + 0.5 / math.sqrt(num_inputs * risk)
    num_tried = 0
    while num_inputs / step**num_tried >= _least_inputs(risk, miss / (num_tried + 1)):
        num_tried += 1
    nothing = (-math.inf, 1.0, 0, 0)
    if num_tried == 0:
        warnings.warn(
            f"{num_inputs} inputs without a single error would prove a risk of {1 - miss ** (1 / num_inputs):.2g}, not "
            f"{risk:g}, so the rule accepts nothing. Pass at least {math.ceil(_least_inputs(risk, miss))}.",
            stacklevel=3,
        )
        return nothing
    ordered, order = scores.sort()
    num_wrong = wrong[order].cumsum(0)
    level = miss / num_tried
    lowest, of = 1.0, 0
    for below in (int(num_inputs / step**number) for number in range(num_tried)):
        threshold = float(ordered[below]) if below < num_inputs else math.inf
        accepted = int(torch.searchsorted(ordered, threshold))  # strictly below it
        errors = int(num_wrong[accepted - 1]) if accepted else 0
        # As many errors as the risk allows prove nothing, and the tail is summed from above the mean alone.
        if errors < risk * accepted and _log_tail(errors, accepted, risk) <= math.log(level):
            return threshold, clopper_pearson(errors, accepted, level), accepted, errors
        if accepted and errors / accepted <= lowest:
            lowest, of = errors / accepted, accepted
    warnings.warn(
        f"No threshold is shown to keep a risk of {risk:g}, so the rule accepts nothing: the lowest error is "
        f"{lowest:.2g}, on {of} of {num_inputs} inputs. Pass more held-out data or a higher risk.",
        stacklevel=3,
    )
    return nothing


def _least_inputs(risk: float, level: float) -> float:
    """How many inputs without an error prove the risk."""
    return math.log(level) / math.log1p(-risk)


def _check_share(name: str, value: float, usual: float, least: float = 0.0) -> float:
    if not least <= value < 1 or value == 0:
        raise ValueError(f"Expected {name} between {least:g} and 1, got {value}. Pass {usual}, for example.")
    return float(value)


Kind = TypeVar("Kind", AbstainRule, FlagRule)


def _parse(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """Makes a rule of what a file holds, after checking every value."""
    types = {field.name: field.type for field in fields(kind)}
    if types.keys() != values.keys():
        raise ValueError(f"missing or unknown fields {listing(sorted(types.keys() ^ values.keys()))}")
    if values["threshold"] in ("inf", "-inf"):
        values["threshold"] = float(values["threshold"])
    for name, value in values.items():
        if types[name] in (By, Link):
            sound = value in get_args(types[name])
        elif types[name] is int:
            sound = type(value) is int and value >= (0 if name in ("num_accepted", "num_errors") else 1)
        else:
            sound = type(value) in (int, float) and (name == "threshold" or 0 < value <= 1)
            sound = sound and not math.isnan(float(value))  # which raises for a whole number beyond float64
        if not sound:
            raise ValueError(f"impossible {name} {value!r:.60}")
    rule = kind(**values)
    if isinstance(rule, AbstainRule) and not (
        rule.num_errors <= rule.num_accepted <= rule.num_inputs and (rule.bound <= rule.risk or not rule.num_accepted)
    ):
        raise ValueError("numbers that contradict each other")
    return rule
