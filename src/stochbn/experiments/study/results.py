"""Draws of every method → every number of the study. Nothing here runs a network."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import PARTS, File, provenance
from stochbn.experiments.report.scores import METRICS, Method, Output, Results, measure, score
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.study.evidence import (
    NUM_RESAMPLES,
    compare,
    ece_by_chance,
    measure_distances,
    measure_draws,
    measure_limits,
)
from stochbn.experiments.study.scores import ENSEMBLES, Draws, Entry, list_entries
from stochbn.experiments.study.study import EXHAUSTIVE, LAST, NUM_COMPARED, NUM_EXACT, PLAIN, VARIANTS, Job, Study

TEMPERED = " + temperature"
# Differences that are told with their intervals.
_ONE, _MANY = f"{LAST}, tuned", "Deep Ensembles + last layer"
COMPARISONS = (
    (_ONE, "Deep Ensembles"),
    (_ONE, f"{PLAIN}{TEMPERED}"),
    (_ONE, EXHAUSTIVE),
    (f"{LAST}{TEMPERED}", "Deep Ensembles"),
    (EXHAUSTIVE, "Deep Ensembles"),
    (_MANY, "Deep Ensembles"),
    (_MANY, f"Deep Ensembles{TEMPERED}"),
    (_MANY, _ONE),
    (f"{_MANY}{TEMPERED}", "Deep Ensembles"),
)


def measure_study(study: Study, files: dict[Job, File], *, num_resamples: int = NUM_RESAMPLES) -> dict[str, Any]:
    """Returns every number of the study; differences by so many resamples."""
    entries = list_entries(study, files)
    validation = study.splits["validation"].labels
    methods: dict[str, Method] = {}
    temperatures, corruptions = {}, {}
    for entry in entries:
        chosen = {unit: unit.choose_temperature(validation) for unit in {*entry.units, *entry.replicas}}
        temperatures[entry.name] = [chosen[unit] for unit in entry.units]
        for suffix in ("", TEMPERED):
            outputs: dict[Draws, dict[str, Output]] = {
                unit: {part: unit.average(part, chosen[unit] if suffix else 1.0) for part in PARTS} for unit in chosen
            }
            own, varied = (tuple(outputs[unit] for unit in units) for units in (entry.units, entry.replicas))
            name = entry.name + suffix
            methods[name] = Method(
                name, entry.seeds, own, own if entry.replicas is entry.units else varied, entry.spread
            )
            if all(part in entry.units[0].files[0].tensors for part in study.corrupted):
                corruptions[name] = _score_corrupted(study, entry, chosen if suffix else dict.fromkeys(chosen, 1.0))
        study.console.print(f"scored {entry.name}", highlight=False)
    units = {entry.name: entry.units for entry in entries}
    scores = score(Results({}, study.splits["test"].labels, methods, True))
    numbers = {
        "experiment": study.experiment.name,
        **provenance(
            " ".join(
                [
                    f"stochbn study {study.experiment.name} --samples {study.num_samples}",
                    *(f'--only "{name}"' for name in study.only),
                ]
            )
        ),
        "drawn_at": sorted({file.header["commit"] for file in files.values()}),
        "num_samples": study.num_samples,
        "num_compared": NUM_COMPARED,
        "num_exact": NUM_EXACT,
        "num_inputs": {name: len(split) for name, split in (study.splits | study.corrupted).items()},
        "metrics": {metric.key: metric.meaning for metric in METRICS},
        "methods": {
            name: {
                "seeds": method.seeds,
                "std_over": method.spread,
                "scores": {key: asdict(found) for key, found in scores[name].items()},
                "each": [measure(output, study.splits["test"].labels) for output in method.outputs],
            }
            for name, method in methods.items()
        },
        "ece_by_chance": {
            name: ece_by_chance([output["test"].probs for output in method.outputs]) for name, method in methods.items()
        },
        "temperatures": temperatures,
        "tuning": _list_tuning(files),
        "cost": {entry.name: entry.cost for entry in entries},
        "corruptions": corruptions,
        "exact": measure_distances(study, files),
        "limits": measure_limits(study, files),
        "draws": measure_draws(study, {name: units[name] for name in (EXHAUSTIVE, _ONE) if name in units}),
        "comparisons": compare(
            methods,
            study.splits["test"].labels,
            [pair for pair in COMPARISONS if all(name in methods for name in pair)],
            num_resamples,
        ),
        "num_resamples": num_resamples,
        "weights_sha256": {
            f"{job.recipe.name} seed {job.seed}": file.header["weights_sha256"][0]
            for job, file in files.items()
            if job.variant.tuned != "ensemble"
        },
    }
    found: dict[str, Any] = rounded(numbers)
    return found


def carry_over(results: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Completes a study of some variants by an earlier one of the same networks, and tells which rows come from there.

    What the earlier one says of a method that was measured anew is dropped. So is what else hangs on its scores (its
    distance to exact inference, the limit of choosing, differences to others) if they are not what they were; and all
    distances to exact inference if those were measured anew.

    Raises:
        DataError: It is of other networks or data.
    """
    same = ("experiment", "num_samples", "draw_seed", "num_inputs", "num_compared", "num_exact")
    different = [key for key in same if results[key] != earlier.get(key, results[key])]
    ours, theirs = (study.get("weights_sha256", {}) for study in (results, earlier))
    if any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys()) or not _alike(results, earlier, PLAIN):
        different.append("networks")
    if different:
        raise DataError(
            f"Expected an earlier study of the same networks and data, got one with other {', '.join(different)}. Draw "
            "all variants (leave --only away), or write into another folder (--out)."
        )
    anew = results["methods"].keys()
    changed = {name for name in anew if not _alike(results, earlier, name, [metric.key for metric in METRICS])}
    whole = dict(results)
    position = {name: place for place, name in enumerate([*(variant.name for variant in VARIANTS), *ENSEMBLES])}
    for key in (
        "methods",
        "ece_by_chance",
        "temperatures",
        "tuning",
        "cost",
        "corruptions",
        "exact",
        "limits",
        "draws",
    ):
        gone = changed if key in ("exact", "limits") else anew
        kept = {name: value for name, value in earlier.get(key, {}).items() if name not in gone}
        joined = sorted(
            (kept | results[key]).items(), key=lambda item: position.get(item[0].removesuffix(TEMPERED), len(position))
        )
        whole[key] = dict(joined)
    whole["exact"] = results["exact"] or whole["exact"]
    whole["comparisons"] = {
        name: found for name, found in earlier.get("comparisons", {}).items() if changed.isdisjoint(name.split(" − "))
    } | results["comparisons"]
    whole["weights_sha256"] = theirs | ours
    known = earlier.get("carried_over", {})
    source = {key: earlier[key] for key in ("command", "commit", "versions")}
    whole["carried_over"] = {name: known.get(name, source) for name in whole["methods"] if name not in anew}
    return whole


def _alike(results: dict[str, Any], earlier: dict[str, Any], name: str, keys: Collection[str] = ("nll",)) -> bool:
    """Tells whether a method's networks have the same scores, but for rounding, which may differ between machines."""
    ours, theirs = (
        [[one[key] for key in keys if key in one] for one in study["methods"].get(name, {"each": []})["each"]]
        for study in (results, earlier)
    )
    return [*map(len, ours)] == [*map(len, theirs)] and np.allclose(ours, theirs, rtol=1e-3)


def _score_corrupted(study: Study, entry: Entry, temperatures: dict[Draws, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in CORRUPTIONS:
        for strength in STRENGTHS:
            part = f"{kind} {strength}"
            labels = study.corrupted[part].labels
            each = [measure({"test": unit.average(part, temperatures[unit])}, labels) for unit in entry.units]
            found[part] = {key: float(np.mean([one[key] for one in each])) for key in ("nll", "ece", "error_percent")}
    return found


def _list_tuning(files: dict[Job, File]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for job, file in files.items():
        if job.variant.tuned and file.header.get("tuning"):
            found.setdefault(job.variant.name, []).append({"seed": job.seed, **file.header["tuning"]})
    return found
