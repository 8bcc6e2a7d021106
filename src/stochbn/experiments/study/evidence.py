"""How far methods are from exact inference, and where more draws or a better choice of spread and temperature end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import stochbn
from stochbn.experiments.files import PARTS, File
from stochbn.experiments.methods import METHODS, Drawing
from stochbn.experiments.report.scores import detect, mean_scores, measure
from stochbn.experiments.study.draws import LIMITS, Task
from stochbn.experiments.study.results import Chance, Distance, FirstDraws, Limit
from stochbn.experiments.study.scores import Draws, find_minimum
from stochbn.inference.tune import TEMPERATURES

T = TypeVar("T", Distance, Limit)

Probs = dict[str, Tensor]  # by part of the data, (N, K)


def ece_by_chance(each: Sequence[Tensor], num_resamples: int = 100) -> Chance:
    """Returns the ECE that is to be expected if probabilities are right: of labels that are drawn from them.

    It is not 0, as a bin of few inputs is seldom right to the digit, and the less so the more inputs are unsure. The
    mean over networks, from the probabilities (N, K) of each.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(probs: Tensor) -> Tensor:
        return torch.multinomial(probs, 1, generator=generator)[:, 0]

    found = [[stochbn.ece(probs, draw(probs)).item() for _ in range(num_resamples)] for probs in each]
    return Chance(float(np.mean(found)), float(np.percentile(found, 95, axis=1).mean()))


def measure_draws(networks: Sequence[Draws], labels: Tensor) -> tuple[FirstDraws, ...]:
    """Scores the first draws of a method's networks, 4, 8, 16 and so on, with their ± over networks."""
    most = min(len(draws.files[0].tensors["test"]) for draws in networks)
    rows = []
    for count in (*(2**power for power in range(2, most.bit_length()) if 2**power < most), most):
        each = [measure({part: draws.average(part, 1.0, count) for part in PARTS}, labels) for draws in networks]
        std = {key: float(np.std([one[key] for one in each], ddof=1)) for key in each[0]} if len(each) > 1 else {}
        rows.append(FirstDraws(count, mean_scores(each), std))
    return tuple(rows)


def measure_limits(files: Mapping[Task, File], labels: Tensor, num_networks: int) -> dict[str, Limit]:
    """Finds what the best spread and temperature, chosen on the test labels themselves, would have given.

    That is no result, but the end of what choosing one spread and one temperature for a network can do with S draws,
    between the smallest and the largest that were tried; a parabola goes through the best and its neighbours.
    `nll` is with the best spread, `nll_temperature` with the best of both, `nll_temperature_only` at the fitted spread;
    each the mean over networks of the lowest NLL of each. `auroc` is the highest of the spreads that were tried.
    """
    by_key = {(task.method.key, task.network): file for task, file in files.items()}
    limits = {}
    for key in ("plain", *LIMITS):
        networks = [task.network for task in files if task.method.key == key][:num_networks]
        tried = {1.0: key} | {spread: METHODS[key].at(spread).key for spread in LIMITS.get(key, ())}
        drawn = [{spread: Draws((by_key[tried[spread], network],)) for spread in sorted(tried)} for network in networks]
        if drawn:
            limits[key] = _mean([_find_limit(one, labels) for one in drawn])
    return limits


def _find_limit(drawn: Mapping[float, Draws], labels: Tensor) -> Limit:
    """Finds it for one network, from its draws by spread."""
    losses = {
        spread: {t: stochbn.nll(draws.average("test", t).probs, labels).item() for t in TEMPERATURES}
        for spread, draws in drawn.items()
    }
    lowest = {t: find_minimum([(spread, curve[t]) for spread, curve in losses.items()])[1] for t in TEMPERATURES}
    entropies = [[draws.average(part).entropy for part in PARTS] for draws in drawn.values()]
    temperature_only = find_minimum(list(losses[1.0].items()))[1]
    return Limit(
        nll=lowest[1.0],
        nll_temperature_only=temperature_only,
        nll_temperature=min(temperature_only, find_minimum(list(lowest.items()))[1]),
        auroc=max(detect(*pair)["auroc"] for pair in entropies),
        num_networks=1,
    )


def measure_distances(files: Mapping[Task, File], labels: Tensor) -> dict[str, Distance]:
    """Measures how far each method of one network is from exact inference on the same inputs.

    The total variation is ½ Σ |p − q| between the predictive means, the mean over inputs and networks, each from its
    draws; "exact" itself is one half of its mini-batches against the other, what chance alone makes. The correlation
    of entropies is Pearson's, over test and out-of-domain inputs together. NLL and AUROC are on the same few inputs,
    for exact inference from all its mini-batches.
    """
    found: dict[str, list[Distance]] = {}
    for task, exact in files.items():
        if task.method.drawing.family != "exact":
            continue
        index = {part: exact.tensors[f"{part}/index"] for part in PARTS}
        known = labels[index["test"]]
        halves = [_average({part: exact.tensors[part].chunk(2)[half] for part in PARTS}) for half in (0, 1)]
        whole: Probs = {part: (halves[0][part] + halves[1][part]) / 2 for part in PARTS}
        found.setdefault(task.method.key, []).append(_find_distance(halves[0], halves[1:], whole, known))
        for other, file in files.items():
            if other.network == task.network and _is_compared(other.method.drawing):
                probs = _average({part: file.tensors[part][:, index[part]] for part in PARTS})
                found.setdefault(other.method.key, []).append(_find_distance(probs, halves, probs, known))
    return {key: _mean(found[key]) for key in METHODS if key in found}


def _is_compared(drawing: Drawing) -> bool:
    """Returns whether a method is meant to be exact inference with one network, or was tuned from one that is."""
    if drawing.family == "exact" or drawing.dropout or drawing.spread is not None:
        return False
    return (drawing.tuned and not drawing.tempered) or drawing.layers == "all"


def _find_distance(probs: Probs, against: Sequence[Probs], scored: Probs, labels: Tensor) -> Distance:
    """Compares predictions with exact ones, the mean over several of those; NLL and AUROC are of `scored`."""

    def find_variation(part: str) -> float:
        return float(np.mean([(probs[part] - other[part]).abs().sum(1).mean().item() / 2 for other in against]))

    entropies = [torch.cat([stochbn.entropy(one[part]) for part in PARTS]).numpy() for one in (probs, *against)]
    known, other = (np.asarray(stochbn.entropy(scored[part])) for part in PARTS)
    return Distance(
        total_variation_test=find_variation("test"),
        total_variation_out_of_domain=find_variation("out-of-domain"),
        entropy_correlation=float(np.mean([np.corrcoef(entropies[0], one)[0, 1] for one in entropies[1:]])),
        nll=stochbn.nll(scored["test"], labels).item(),
        auroc_entropy=detect(known, other)["auroc"],
        num_networks=1,
    )


def _average(draws: Mapping[str, Tensor]) -> Probs:
    """Returns the mean of the draws' probabilities, by part."""
    averaged = Draws((File({}, dict(draws)),))
    return {part: averaged.average(part).probs for part in draws}


def _mean(each: Sequence[T]) -> T:
    """Returns the mean over networks, with how many there are."""
    means: dict[str, Any] = dict(mean_scores([asdict(one) for one in each]))
    return type(each[0])(**means | {"num_networks": len(each)})
