"""Draws of every method → every number of the study. Nothing here runs a network.

A method's temperature is chosen on its validation draws, and divides the log-probabilities of each draw.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import stochbn
from stochbn.experiments.checkpoints import checkpoint_path, read_checkpoint
from stochbn.experiments.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.evaluate import provenance
from stochbn.experiments.predictions import PARTS, File
from stochbn.experiments.scores import METRICS, Method, Output, Results, detect, measure, score
from stochbn.experiments.study import NUM_COMPARED, NUM_EXACT, VARIANTS, Job, Study
from stochbn.experiments.tables import rounded
from stochbn.tuning import TEMPERATURES, find_minimum

# Ensembles by name, and whose draws their members make.
ENSEMBLES = {
    "Deep Ensembles": "One network",
    "Deep Ensembles + SBN": "SBN",
    "Deep Ensembles + SBN, tuned": "Members of SBN, tuned",
    "Deep Ensembles + empirical, conditioned, tuned": "Members of empirical, tuned",
}
TEMPERED = " + temperature"


@dataclass(frozen=True, eq=False)
class Draws:
    """The draws of one network, or of the members of an ensemble, by part of the data: (S, N, K) log-probabilities."""

    files: tuple[File, ...]

    def average(self, part: str, temperature: float = 1.0) -> Output:
        """Returns the mean of the probabilities, and of the entropies if there are several, over all draws."""
        _, num_inputs, num_classes = self.files[0].tensors[part].shape
        probs = torch.zeros(num_inputs, num_classes, dtype=torch.float64)
        entropy, count = torch.zeros(num_inputs, dtype=torch.float64), 0
        for chunk in (chunk for file in self.files for chunk in file.tensors[part].split(10)):
            each = (chunk.float() / temperature).softmax(2).double()  # (s, N, K)
            probs += each.sum(0)
            entropy += stochbn.entropy(each.flatten(0, 1)).view(len(each), -1).sum(0)
            count += len(each)
        return Output(probs / count, entropy / count if count > 1 else None)

    def choose_temperature(self, labels: Tensor) -> float:
        """Returns the temperature with the lowest NLL on the validation draws."""
        losses = [(t, stochbn.nll(self.average("validation", t).probs, labels).item()) for t in TEMPERATURES]
        return find_minimum(losses)[0]


@dataclass(frozen=True, eq=False)
class Entry:
    """A method of the study.

    Attributes:
        name: As in the tables.
        seeds: Of its networks.
        units: What is scored: each network, or the ensemble.
        replicas: What the ± is the standard deviation over: the same, or the ensembles that leave one member out.
        cost: What a prediction costs, and what has to be trained and kept for it.
    """

    name: str
    seeds: tuple[int, ...]
    units: tuple[Draws, ...]
    replicas: tuple[Draws, ...]
    cost: dict[str, float]

    @property
    def spread(self) -> str:
        """The ± in words."""
        return f"{len(self.replicas)} {'seeds' if self.replicas is self.units else 'ensembles that leave one out'}"


def read_draws(study: Study) -> dict[Job, File]:
    """Reads what the study has drawn."""
    return {job: File.read(job.path) for job in study.jobs}


def measure_study(study: Study, files: dict[Job, File]) -> dict[str, Any]:
    """Returns every number of the study."""
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
    scores = score(Results({}, study.splits["test"].labels, methods, True))
    numbers = {
        "experiment": study.experiment.name,
        **provenance(f"stochbn study {study.experiment.name} --samples {study.num_samples}"),
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
        "temperatures": temperatures,
        "tuning": _list_tuning(files),
        "cost": {entry.name: entry.cost for entry in entries},
        "corruptions": corruptions,
        "exact": measure_distances(study, files),
    }
    found: dict[str, Any] = rounded(numbers)
    return found


def list_entries(study: Study, files: dict[Job, File]) -> list[Entry]:
    """Joins networks and ensembles into methods; an ensemble needs two networks."""
    by_name = {
        variant.name: [(job, file) for job, file in files.items() if job.variant == variant] for variant in VARIANTS
    }
    entries = []
    for variant in VARIANTS:
        drawn = by_name[variant.name]
        if drawn and variant.family != "exact" and variant.tuned != "ensemble":
            units = tuple(Draws((file,)) for _, file in drawn)
            entries.append(Entry(variant.name, _seeds(drawn), units, units, _cost(drawn[:1])))
    for name, member in ENSEMBLES.items():
        drawn = by_name[member]
        if len(drawn) > 1:
            whole = Draws(tuple(file for _, file in drawn))
            rest = [Draws(whole.files[:i] + whole.files[i + 1 :]) for i in range(len(drawn)) if len(drawn) > 2]
            entries.append(Entry(name, _seeds(drawn), (whole,), tuple(rest) or (whole,), _cost(drawn)))
    return entries


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
            other.variant.name: {part: Draws((drawn,)).average(part).probs[index[part]] for part in PARTS}
            for other, drawn in files.items()
            if (other.recipe, other.seed) == (job.recipe, job.seed)
            and other.variant.family != "exact"
            and other.variant.tuned != "ensemble"
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


def _score_corrupted(study: Study, entry: Entry, temperatures: dict[Draws, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in CORRUPTIONS:
        for strength in STRENGTHS:
            part = f"{kind} {strength}"
            labels = study.corrupted[part].labels
            each = [measure({"test": unit.average(part, temperatures[unit])}, labels) for unit in entry.units]
            found[part] = {key: float(np.mean([one[key] for one in each])) for key in ("nll", "ece", "error_percent")}
    return found


def _cost(drawn: list[tuple[Job, File]]) -> dict[str, float]:
    checkpoints = [read_checkpoint(checkpoint_path(job.recipe, job.seed)) for job, _ in drawn]
    weights = sum(w.numel() * w.element_size() for checkpoint in checkpoints for w in checkpoint.weights.values())
    return {
        "passes": sum(len(file.tensors["test"]) for _, file in drawn),
        "weights_bytes": weights,
        "statistics_bytes": sum(file.header.get("stats_bytes", 0) for _, file in drawn),
        "train_hours": sum(e["seconds"] for checkpoint in checkpoints for e in checkpoint.history) / 3600,
    }


def _seeds(drawn: list[tuple[Job, File]]) -> tuple[int, ...]:
    return tuple(job.seed for job, _ in drawn)


def _list_tuning(files: dict[Job, File]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for job, file in files.items():
        if file.header.get("tuning"):
            found.setdefault(job.variant.name, []).append({"seed": job.seed, **file.header["tuning"]})
    return found
