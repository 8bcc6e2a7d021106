"""Draws of every method → averages of one network, or of an ensemble, and what they cost. Nothing here runs a network.

A method's temperature is chosen on its validation draws, and divides the log-probabilities of each draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import stochbn
from stochbn.experiments.files import File
from stochbn.experiments.report.scores import Output
from stochbn.experiments.study.study import LAST, PLAIN, VARIANTS, Job, Study
from stochbn.experiments.training.checkpoints import checkpoint_path, read_checkpoint
from stochbn.inference.tune import TEMPERATURES, find_minimum

# Ensembles by name, and whose draws their members make.
ENSEMBLES = {
    "Deep Ensembles": PLAIN,
    "Deep Ensembles + SBN": "SBN",
    "Deep Ensembles + SBN, tuned": "Members of SBN, tuned",
    "Deep Ensembles + empirical, conditioned, tuned": "Members of empirical, tuned",
    "Deep Ensembles + last layer": LAST,
}


@dataclass(frozen=True, eq=False)
class Draws:
    """The draws of one network, or of the members of an ensemble, by part of the data: (S, N, K) log-probabilities."""

    files: tuple[File, ...]

    def average(self, part: str, temperature: float = 1.0, num_samples: int | None = None) -> Output:
        """Returns the mean of the probabilities, and of the entropies if there are several, over all draws or some."""
        _, num_inputs, num_classes = self.files[0].tensors[part].shape
        probs = torch.zeros(num_inputs, num_classes, dtype=torch.float64)
        entropy, count = torch.zeros(num_inputs, dtype=torch.float64), 0
        for chunk in (chunk for file in self.files for chunk in file.tensors[part][:num_samples].split(10)):
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


def list_entries(study: Study, files: dict[Job, File]) -> list[Entry]:
    """Joins networks and ensembles into methods; an ensemble needs two networks."""
    by_name = {
        variant.name: [(job, file) for job, file in files.items() if job.variant == variant] for variant in VARIANTS
    }
    entries = []
    for variant in VARIANTS:
        drawn = by_name[variant.name]
        if drawn and variant.family != "exact" and variant.tuned != "ensemble" and variant.spread is None:
            units = tuple(Draws((file,)) for _, file in drawn)
            entries.append(Entry(variant.name, _seeds(drawn), units, units, _cost(drawn[:1])))
    for name, member in ENSEMBLES.items():
        drawn = by_name[member]
        if len(drawn) > 1:
            whole = Draws(tuple(file for _, file in drawn))
            rest = [Draws(whole.files[:i] + whole.files[i + 1 :]) for i in range(len(drawn)) if len(drawn) > 2]
            entries.append(Entry(name, _seeds(drawn), (whole,), tuple(rest) or (whole,), _cost(drawn)))
    return entries


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
