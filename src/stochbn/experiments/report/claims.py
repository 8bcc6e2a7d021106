"""What the paper concludes from its Table 1 and ECDF figures, and its numbers, checked on ours. Pure functions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stochbn.experiments.report.paper import Papers
from stochbn.experiments.report.scores import Method, Results, Scores, Values, ecdf


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, whether it holds here (None: not measured), and the numbers."""

    statement: str
    holds: bool | None
    evidence: str


def check_claims(results: Results, scores: Scores) -> list[Claim]:
    """Checks what the paper concludes from its Table 1 and ECDF figures, with the numbers that decide.

    A paired difference is over the test inputs, of the loss averaged over the networks, with its standard error.
    """
    methods = results.methods
    baselines = [base for base in ("Deep Ensembles", "Dropout") if base in methods]
    pairs = [(base, f"{base} + SBN") for base in baselines if f"{base} + SBN" in methods]
    claims = []
    for base, extended in pairs:
        without, with_sbn = (scores[name]["nll"].value for name in (base, extended))
        change, deviation = _paired_difference(_log_loss, methods[extended], methods[base], results.labels)
        numbers = f"{without:.4f} without, {with_sbn:.4f} with; paired difference {change:+.4f} ± {deviation:.4f}"
        claims.append(Claim(f"{base}: SBN lowers the NLL, or leaves it", with_sbn <= without, numbers))
    for base, extended in pairs:
        without, with_sbn = (scores[name]["error_percent"].value for name in (base, extended))
        change, deviation = _paired_difference(_zero_one_loss, methods[extended], methods[base], results.labels)
        statement = f"{base}: SBN keeps the level of error (paired difference within two standard errors)"
        numbers = f"{without:.2f} % without, {with_sbn:.2f} % with; {100 * change:+.3f} ± {100 * deviation:.3f} points"
        claims.append(Claim(statement, abs(change) <= 2 * deviation, numbers))
    medians = {
        name: found["entropy_out_of_domain"].value for name, found in scores.items() if results.has_out_of_domain
    }
    for base, extended in pairs:
        statement = f"{base}: SBN moves the out-of-domain ECDF to the right (the median, and 90 % of thresholds)"
        holds, numbers = None, "no out-of-domain predictions"
        if medians:
            left, right = (methods[name].pooled_entropy("out-of-domain") for name in (base, extended))
            share = dominance(left, right, highest=math.log(len(results.header["classes"])))
            holds = medians[extended] > medians[base] and share >= 0.9
            numbers = f"median {medians[base]:.3f} without, {medians[extended]:.3f} with; "
            numbers += f"at or to the right of it at {100 * share:.1f} % of thresholds"
        claims.append(Claim(statement, holds, numbers))
    if baselines and "SBN" in methods:
        statement = f"SBN alone is more overconfident than {' and '.join(baselines)} (median out-of-domain entropy)"
        holds, numbers = None, "no out-of-domain predictions"
        if medians:
            holds = all(medians["SBN"] < medians[base] for base in baselines)
            numbers = f"{medians['SBN']:.3f} against {' and '.join(f'{medians[base]:.3f}' for base in baselines)}"
        claims.append(Claim(statement, holds, numbers))
    return claims


def check_reproduction(scores: Scores, papers: Papers) -> list[Claim]:
    """Checks each of the paper's rows: error within 0.15 points, NLL no higher than the paper's plus its ±.

    Example:
        >>> from stochbn.experiments.report.paper import PaperScore
        >>> from stochbn.experiments.report.scores import Score
        >>> ours, theirs = {"SBN": {"nll": Score(0.0213, None, 9)}}, {"SBN": {"nll": PaperScore(0.025, 0.003, "")}}
        >>> check_reproduction(ours, theirs)[0].holds
        True
    """
    claims = []
    for name, row in papers.items():
        if "error_percent" in row:
            ours, theirs = scores[name]["error_percent"].value, row["error_percent"].value
            numbers = f"{ours:.2f} % here, {theirs:.2f} % in the paper"
            claims.append(Claim(f"{name}: error within 0.15 points of Table 1", abs(ours - theirs) <= 0.15, numbers))
        if "nll" in row:
            ours, printed = scores[name]["nll"].value, row["nll"]
            limit = printed.value + (printed.std or 0) + 0.0005  # the paper rounds to 0.001
            numbers = f"{ours:.4f} here, {printed.value:.3f} ± {printed.std or 0:.3f} in the paper"
            claims.append(Claim(f"{name}: NLL no higher than Table 1, with its ±", ours <= limit, numbers))
    return claims


def dominance(left: Values, right: Values, highest: float, num_thresholds: int = 1000) -> float:
    """Returns at what share of evenly spaced thresholds in (0, highest) the ECDF of `right` is at or below `left`'s.

    Example:
        >>> dominance(np.array([0.1, 0.2]), np.array([0.3, 0.4]), highest=1.0)
        1.0
    """
    thresholds = np.linspace(0, highest, num_thresholds + 2)[1:-1]
    return float(np.mean(ecdf(right, thresholds) <= ecdf(left, thresholds)))


def _log_loss(probs: Tensor, labels: Tensor) -> Tensor:
    return -probs.gather(1, labels[:, None])[:, 0].clamp_min(torch.finfo(probs.dtype).tiny).log()


def _zero_one_loss(probs: Tensor, labels: Tensor) -> Tensor:
    return (probs.argmax(1) != labels).double()


def _paired_difference(
    loss: Callable[[Tensor, Tensor], Tensor], new: Method, old: Method, labels: Tensor
) -> tuple[float, float]:
    """Returns the mean over inputs of new − old, each the mean over its networks, and its standard error."""
    means = [torch.stack([loss(o["test"].probs, labels) for o in method.outputs]).mean(0) for method in (new, old)]
    difference = means[0] - means[1]  # (N,)
    return difference.mean().item(), (difference.std() / math.sqrt(len(difference))).item()
