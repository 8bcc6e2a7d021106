"""What the paper prints and concludes, set beside ours and checked on it. Pure functions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.scores import Results, Scored, Scores, Values, ecdf, log_loss

# Table 1 as printed: error in % and NLL, each with its ±; then the median out-of-domain entropy, read off the plots.
_PAPER: dict[str, dict[str, tuple[float, float, float, float, float]]] = {
    "lenet5": {
        "sbn": (0.53, 0.05, 0.025, 0.003, 0.03),
        "ensemble": (0.43, 0.0, 0.015, 0.001, 0.56),
        "ensemble+sbn": (0.43, 0.0, 0.014, 0.001, 0.58),
        "dropout": (0.51, 0.0, 0.016, 0.0, 0.68),
        "dropout+sbn": (0.49, 0.0, 0.015, 0.0, 0.70),
    },
    "vgg11": {
        "sbn": (5.76, 0.0, 0.302, 0.002, 0.02),
        "ensemble": (5.18, 0.0, 0.177, 0.004, 0.22),
        "ensemble+sbn": (5.23, 0.0, 0.154, 0.002, 0.27),
        "dropout": (5.32, 0.0, 0.155, 0.001, 0.25),
        "dropout+sbn": (5.38, 0.0, 0.149, 0.001, 0.38),
    },
    "resnet18": {
        "sbn": (4.35, 0.17, 0.255, 0.018, 0.00),
        "ensemble": (3.37, 0.0, 0.138, 0.005, 0.17),
        "ensemble+sbn": (3.34, 0.0, 0.110, 0.004, 0.27),
    },
}
# How far the error may be from the paper's, in points: networks on CIFAR5 are trained for a fraction of its epochs.
_ERROR_TOLERANCE = {"lenet5": 0.15, "vgg11": 1.5, "resnet18": 1.5}
# The paper's rounding, and how well its plots can be read.
_HALF_DIGIT = {"error_percent": 0.005, "nll": 0.0005, "entropy_out_of_domain": 0.02}
_NO_OUT_OF_DOMAIN = "no out-of-domain predictions"
_PAIRS = (("plain", "sbn"), ("ensemble", "ensemble+sbn"), ("dropout", "dropout+sbn"))  # without SBN, and with it


@dataclass(frozen=True)
class PaperScore:
    """A number of the paper, its ± if it is printed, and in words where ours lies."""

    value: float
    std: float | None
    verdict: str


Papers = dict[str, dict[str, PaperScore]]  # by the keys of method and metric


@dataclass(frozen=True)
class Claim:
    """A claim, whether it holds here (None: not measured), and the numbers."""

    statement: str
    holds: bool | None
    evidence: str


def set_beside(experiment: str, scores: Scores) -> Papers:
    """Sets the paper's numbers beside ours: by method and metric; empty where the paper has none.

    Ours is within the paper's ± if it is so after rounding as the paper does.

    Examples:
        >>> from stochbn.experiments.report.scores import Score
        >>> set_beside("lenet5", {"sbn": {"nll": Score(0.0213, None, 10_000)}})["sbn"]["nll"].verdict
        '0.004 lower'
    """
    table: Papers = {}
    for method, (error, error_std, nll, nll_std, median) in _PAPER.get(experiment, {}).items():
        printed = {"error_percent": (error, error_std), "nll": (nll, nll_std), "entropy_out_of_domain": (median, None)}
        for key, (value, std) in printed.items():
            if key in scores.get(method, {}):
                difference = scores[method][key].value - value
                verdict = f"{abs(difference):.{3 if key == 'nll' else 2}f} {'lower' if difference < 0 else 'higher'}"
                if abs(difference) <= (std or 0) + _HALF_DIGIT[key]:
                    verdict = "the same" if std is None else "within ±"
                table.setdefault(method, {})[key] = PaperScore(value, std, verdict)
    return table


def check_claims(results: Results, scores: Scores) -> list[Claim]:
    """Checks what the paper concludes from its Table 1 and ECDF figures, with the numbers that decide.

    A paired difference is over the test inputs, of the loss averaged over the networks, with its standard error.
    """
    pairs = [pair for pair in _PAIRS if all(key in results.methods for key in pair)]
    by_pair = [_check_pair(results, scores, *pair) for pair in pairs]
    claims = [claim for alike in zip(*by_pair, strict=True) for claim in alike]  # the NLL of every pair comes first
    return [*claims, *_check_overconfidence(results, scores)]


def check_reproduction(experiment: str, scores: Scores, papers: Papers) -> list[Claim]:
    """Checks each of the paper's rows: the error near the paper's, the NLL no higher than the paper's plus its ±.

    Examples:
        >>> from stochbn.experiments.report.scores import Score
        >>> ours = {"sbn": {"nll": Score(0.0213, None, 9)}}
        >>> check_reproduction("lenet5", ours, set_beside("lenet5", ours))[0].holds
        True
    """
    claims = []
    for method, row in papers.items():
        label, ours = METHODS[method].label, scores[method]
        if "error_percent" in row:
            error, theirs, limit = ours["error_percent"].value, row["error_percent"].value, _ERROR_TOLERANCE[experiment]
            numbers = f"{error:.2f} % here, {theirs:.2f} % in the paper"
            claims.append(
                Claim(f"{label}: error within {limit:g} points of Table 1", abs(error - theirs) <= limit, numbers)
            )
        if "nll" in row:
            nll, printed = ours["nll"].value, row["nll"]
            highest = printed.value + (printed.std or 0) + _HALF_DIGIT["nll"]
            numbers = f"{nll:.4f} here, {printed.value:.3f} ± {printed.std or 0:.3f} in the paper"
            claims.append(Claim(f"{label}: NLL no higher than Table 1, with its ±", nll <= highest, numbers))
    return claims


def dominance(left: Values, right: Values, highest: float, num_thresholds: int = 1000) -> float:
    """Returns at what share of evenly spaced thresholds in (0, highest) the ECDF of `right` is at or below `left`'s.

    Examples:
        >>> dominance(np.array([0.1, 0.2]), np.array([0.3, 0.4]), highest=1.0)
        1.0
    """
    thresholds = np.linspace(0, highest, num_thresholds + 2)[1:-1]
    return float(np.mean(ecdf(right, thresholds) <= ecdf(left, thresholds)))


def _check_pair(results: Results, scores: Scores, base: str, extended: str) -> Iterator[Claim]:
    """Checks what SBN does to a method: to its NLL, its error and its out-of-domain entropy."""
    label, both = results.methods[base].label, (base, extended)
    without, with_sbn = (scores[key]["nll"].value for key in both)
    change, deviation = _paired_difference(log_loss, results, extended, base)
    numbers = f"{without:.4f} without, {with_sbn:.4f} with; paired difference {change:+.4f} ± {deviation:.4f}"
    yield Claim(f"{label}: SBN lowers the NLL, or leaves it", with_sbn <= without, numbers)

    without, with_sbn = (scores[key]["error_percent"].value for key in both)
    change, deviation = _paired_difference(_zero_one_loss, results, extended, base)
    statement = "SBN keeps the level of error (paired difference within two standard errors)"
    numbers = f"{without:.2f} % without, {with_sbn:.2f} % with; {100 * change:+.3f} ± {100 * deviation:.3f} points"
    yield Claim(f"{label}: {statement}", abs(change) <= 2 * deviation, numbers)

    statement = "SBN moves the out-of-domain ECDF to the right (the median, and 90 % of thresholds)"
    holds, numbers = None, _NO_OUT_OF_DOMAIN
    if results.has_out_of_domain:
        without, with_sbn = (scores[key]["entropy_out_of_domain"].value for key in both)
        left, right = (results.methods[key].pooled_entropy("out-of-domain") for key in both)
        share = dominance(left, right, highest=math.log(len(results.header["classes"])))
        holds = with_sbn > without and share >= 0.9
        numbers = f"median {without:.3f} without, {with_sbn:.3f} with; "
        numbers += f"at or to the right of it at {100 * share:.1f} % of thresholds"
    yield Claim(f"{label}: {statement}", holds, numbers)


def _check_overconfidence(results: Results, scores: Scores) -> list[Claim]:
    baselines = [key for key in ("ensemble", "dropout") if key in results.methods]
    if not baselines or "sbn" not in results.methods:
        return []
    names = " and ".join(results.methods[key].label for key in baselines)
    holds, numbers = None, _NO_OUT_OF_DOMAIN
    if results.has_out_of_domain:
        ours, *others = (scores[key]["entropy_out_of_domain"].value for key in ("sbn", *baselines))
        holds = all(ours < other for other in others)
        numbers = f"{ours:.3f} against {' and '.join(f'{other:.3f}' for other in others)}"
    return [Claim(f"SBN alone is more overconfident than {names} (median out-of-domain entropy)", holds, numbers)]


def _zero_one_loss(probs: Tensor, labels: Tensor) -> Tensor:
    return (probs.argmax(1) != labels).double()


def _paired_difference(
    loss: Callable[[Tensor, Tensor], Tensor], results: Results, new: str, old: str
) -> tuple[float, float]:
    """Returns the mean over inputs of new − old, each the mean over its networks, and its standard error."""

    def mean(scored: Scored) -> Tensor:
        return torch.stack([loss(output["test"].probs, results.labels) for output in scored.outputs]).mean(0)  # (N,)

    difference = mean(results.methods[new]) - mean(results.methods[old])
    return difference.mean().item(), (difference.std() / math.sqrt(len(difference))).item()
