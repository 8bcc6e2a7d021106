"""How sure the study's differences are, how far methods are from exact inference, and where choosing ends.

Is a difference more than chance? Would more draws, or a better choice of spread and temperature, have changed it?
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from torch import Tensor

import stochbn
from stochbn.experiments.files import PARTS, File
from stochbn.experiments.report.scores import Method, Output, Values, detect, measure
from stochbn.experiments.study.scores import Draws
from stochbn.experiments.study.study import LIMITS, NUM_COMPARED, PLAIN, VARIANTS, Job, Study
from stochbn.inference.tune import TEMPERATURES, find_minimum
from stochbn.uncertainty import brier, ece, error, nll

NUM_RESAMPLES = 500
_SEED = 0

_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "error_percent": lambda probs, labels: 100 * error(probs, labels),
    "nll": nll,
    "ece": ece,
    "brier": brier,
}

Rows = Mapping[str, NDArray[np.int64]]  # which inputs of each part


def compare(
    methods: Mapping[str, Method], labels: Tensor, pairs: Sequence[tuple[str, str]], num_resamples: int = NUM_RESAMPLES
) -> dict[str, dict[str, dict[str, float]]]:
    """Tells by how much the first method of each pair scores above the second, with 95 % intervals.

    A paired bootstrap: images are drawn with replacement, and so are the n networks that a method is scored on one by
    one (n − 1 at a time, which gives their mean its variance), the same for all methods. An ensemble stays the one that
    it is: the intervals are those of other images and other single networks, given this ensemble. They are mirrored
    around the difference ("basic"), as resampling adds to scores such as the ECE what it must not add to the interval.

    Args:
        methods: By name. Each is scored on the same n networks in the same order, or is one ensemble.
        labels: Of the test data, (N,).
        pairs: Names of methods.
        num_resamples: How often images and networks are drawn.

    Returns:
        `{"first − second": {score: {"difference", "low", "high"}}}`.
    """
    generator = np.random.default_rng(_SEED)
    used = sorted({name for pair in pairs for name in pair})
    if not used:
        return {}
    counts = {part: len(output.probs) for part, output in methods[used[0]].outputs[0].items()}
    num_networks = max(len(methods[name].outputs) for name in used)
    if any(len(methods[name].outputs) not in (1, num_networks) for name in used):
        raise ValueError(f"Expected methods with the same networks, got {used}. Compare those alone that have all.")
    whole: Rows = {part: np.arange(count) for part, count in counts.items()}
    found = {name: _average([_score(output, whole, labels) for output in methods[name].outputs]) for name in used}
    varied: dict[str, list[dict[str, float]]] = {name: [] for name in used}
    for _ in range(num_resamples):
        rows: Rows = {part: generator.integers(count, size=count) for part, count in counts.items()}
        networks = generator.integers(num_networks, size=max(1, num_networks - 1))
        for name in used:
            each = [_score(output, rows, labels) for output in methods[name].outputs]
            varied[name].append(_average(each if len(each) == 1 else [each[i] for i in networks]))
    differences: dict[str, dict[str, dict[str, float]]] = {}
    for first, second in pairs:
        differences[f"{first} − {second}"] = {
            key: {"difference": difference, "low": 2 * difference - high, "high": 2 * difference - low}
            for key in found[first]
            for difference in [found[first][key] - found[second][key]]
            for low, high in [
                np.percentile(
                    [a[key] - b[key] for a, b in zip(varied[first], varied[second], strict=True)], [2.5, 97.5]
                )
            ]
        }
    return differences


def _score(output: Mapping[str, Output], rows: Rows, labels: Tensor) -> dict[str, float]:
    known = torch.from_numpy(rows["test"])
    probs = output["test"].probs[known]
    scores = {key: score(probs, labels[known]).item() for key, score in _SCORES.items()}
    entropies: list[Values] = [output[part].entropy[rows[part]] for part in PARTS]
    truth = np.repeat([0, 1], [len(values) for values in entropies])
    scores["auroc_entropy"] = float(roc_auc_score(truth, np.concatenate(entropies)))
    return scores


def _average(each: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([scores[key] for scores in each])) for key in each[0]}


def ece_by_chance(each: Sequence[Tensor], num_resamples: int = 100) -> dict[str, float]:
    """Returns the ECE that is to be expected if probabilities are right: of labels that are drawn from them.

    It is not 0, as a bin of few inputs is seldom right to the digit, and the less so the more inputs are unsure.

    Args:
        each: Probabilities of each network, (N, K).
        num_resamples: How often labels are drawn.

    Returns:
        The mean, and "high", what is exceeded in one case of twenty; both the mean over networks.
    """
    generator = torch.Generator().manual_seed(_SEED)
    found = [
        [ece(probs, torch.multinomial(probs, 1, generator=generator)[:, 0]).item() for _ in range(num_resamples)]
        for probs in each
    ]
    return {"mean": float(np.mean(found)), "high": float(np.percentile(found, 95, axis=1).mean())}


def measure_draws(study: Study, methods: Mapping[str, Sequence[Draws]]) -> dict[str, list[dict[str, float]]]:
    """Scores the first draws of each method's networks, 4, 8, 16 and so on: the mean over networks."""
    labels = study.splits["test"].labels
    found = {}
    for name, networks in methods.items():
        most = min(len(draws.files[0].tensors["test"]) for draws in networks)
        rows = []
        for count in (*(2**power for power in range(2, most.bit_length()) if 2**power < most), most):
            each = [measure({part: draws.average(part, 1.0, count) for part in PARTS}, labels) for draws in networks]
            rows.append({"num_samples": count} | {key: float(np.mean([one[key] for one in each])) for key in each[0]})
        found[name] = rows
    return found


def measure_limits(study: Study, files: dict[Job, File]) -> dict[str, dict[str, float]]:
    """Finds what the best spread and temperature, chosen on the test labels themselves, would have given.

    That is no result, but the end of what choosing one spread and one temperature for a network can do with S draws,
    between the smallest and the largest spread that were tried; a parabola goes through the best and its neighbours.
    `nll` is with the best spread, `nll_temperature` with the best of both, `nll_temperature_only` at the fitted spread;
    each the mean over networks of the lowest NLL of each. `auroc` is the highest of the spreads that were tried.
    """
    labels = study.splits["test"].labels
    found = {}
    for name in (PLAIN, *LIMITS):
        rows = []
        for job in [job for job in study.jobs if job.variant.name == name][:NUM_COMPARED]:
            drawn = {
                other.variant.spread or 1.0: Draws((file,))
                for other, file in files.items()
                if (other.recipe, other.seed) == (job.recipe, job.seed)
                and (other.variant == job.variant or other.variant.name.startswith(f"{name}, spread"))
            }
            if drawn.keys() != {1.0, *LIMITS.get(name, ())}:
                continue  # some were not drawn
            curves = {
                spread: [(t, stochbn.nll(draws.average("test", t).probs, labels).item()) for t in TEMPERATURES]
                for spread, draws in sorted(drawn.items())
            }
            entropies = [[np.asarray(draws.average(part).entropy) for part in PARTS] for draws in drawn.values()]
            rows.append(
                {
                    "nll": find_minimum([(spread, dict(curve)[1.0]) for spread, curve in curves.items()])[1],
                    "nll_temperature_only": min(loss for _, loss in curves[1.0]),
                    "nll_temperature": min(
                        find_minimum([(k, dict(curve)[t]) for k, curve in curves.items()])[1] for t in TEMPERATURES
                    ),
                    "auroc": max(detect(*pair)["auroc"] for pair in entropies),
                }
            )
        if rows:
            means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
            found[name] = means | {"num_networks": len(rows)}
    return found


def measure_distances(study: Study, files: dict[Job, File]) -> dict[str, dict[str, float]]:
    """Measures how far each method of one network is from exact inference on the same inputs.

    `total_variation` is ½ Σ |p − q| between the predictive means, the mean over inputs and networks, each from S draws;
    "Exact (eq. 3)" itself is one half of its mini-batches against the other, what chance alone makes.
    `entropy_correlation` is Pearson's, over test and out-of-domain inputs together. NLL and AUROC are on the same few
    inputs, for exact inference from all its mini-batches.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for job, file in files.items():
        if job.variant.family != "exact":
            continue
        index = {part: file.tensors[f"{part}/index"] for part in PARTS}
        halves = [
            {part: Draws((File({}, {part: file.tensors[part].chunk(2)[half]}),)).average(part).probs for part in PARTS}
            for half in (0, 1)
        ]
        others = {
            variant.name: {
                part: Draws((File({}, {part: file.tensors[f"{part}/{variant.name}"]}),)).average(part).probs
                for part in PARTS
            }
            for variant in VARIANTS
            if variant.approximates
        } | {
            other.variant.name: {part: Draws((drawn,)).average(part).probs[index[part]] for part in PARTS}
            for other, drawn in files.items()
            if (other.recipe, other.seed) == (job.recipe, job.seed) and other.variant.tuned in ("network", "layers")
        }
        labels = study.splits["test"].labels[index["test"]]
        whole = {part: (halves[0][part] + halves[1][part]) / 2 for part in PARTS}
        for name, probs in (others | {job.variant.name: halves[0]}).items():
            against = halves[1:] if name == job.variant.name else halves
            row = {
                f"total_variation_{part.replace('-', '_')}": float(
                    np.mean([((probs[part] - half[part]).abs().sum(1) / 2).mean().item() for half in against])
                )
                for part in PARTS
            }
            entropies = [
                np.concatenate([stochbn.entropy(one[part]).numpy() for part in PARTS]) for one in (probs, *against)
            ]
            scored = whole if name == job.variant.name else probs
            row["nll"] = stochbn.nll(scored["test"], labels).item()
            known, strange = (np.asarray(stochbn.entropy(scored[part])) for part in PARTS)
            row["auroc_entropy"] = detect(known, strange)["auroc"]
            row["entropy_correlation"] = float(np.mean([np.corrcoef(entropies[0], e)[0, 1] for e in entropies[1:]]))
            found.setdefault(name, []).append(row)
    return {
        name: {key: float(np.mean([row[key] for row in rows])) for key in rows[0]} | {"num_networks": len(rows)}
        for name, rows in found.items()
    }
