"""Draws of every method → averages of one network, or of an ensemble, and what they cost. Nothing here runs a network.

A method's temperature is chosen on its validation draws, and divides the log-probabilities of each draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import stochbn
from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS, Method
from stochbn.experiments.report.choose import can_choose
from stochbn.experiments.report.scores import Output
from stochbn.experiments.study.draws import Task
from stochbn.experiments.study.results import Choice, Cost
from stochbn.experiments.training.checkpoints import checkpoint_path, read_checkpoint
from stochbn.inference.tune import TEMPERATURES

Drawn = Sequence[tuple[Task, File]]  # of one method, by network


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

    @property
    def tuned_temperature(self) -> float:
        """That of a network which was tuned."""
        temperature: float = self.files[0].header["tuning"]["temperature"]
        return temperature

    def choose_temperature(self, labels: Tensor) -> float:
        """Returns the temperature with the lowest NLL on the validation draws; 1 if they have hardly a mistake."""
        if not can_choose(self.average("validation").probs, labels):
            return 1.0
        losses = [(t, stochbn.nll(self.average("validation", t).probs, labels).item()) for t in TEMPERATURES]
        return find_minimum(losses)[0]


@dataclass(frozen=True, eq=False)
class Entry:
    """A method of the study."""

    method: Method  # from the table of methods
    seeds: tuple[int, ...]  # of its networks
    units: tuple[Draws, ...]  # what is scored: each network, or the ensemble
    # What the ± is the standard deviation over: the same, or the ensembles that leave one member out
    replicas: tuple[Draws, ...]
    choices: tuple[Choice, ...]  # the spreads that were chosen for its networks
    cost: Cost  # of one network, or of the ensemble

    @property
    def std_over(self) -> str:
        """What the ± is over, in words."""
        return f"{len(self.replicas)} {'seeds' if self.replicas is self.units else 'ensembles that leave one out'}"


def list_entries(files: dict[Task, File]) -> list[Entry]:
    """Joins networks and ensembles into methods, in the order of the table; an ensemble needs two networks."""
    drawn: dict[str, list[tuple[Task, File]]] = {}
    for task, file in files.items():
        drawn.setdefault(task.method.key, []).append((task, file))
    entries = []
    for key, method in METHODS.items():
        found = drawn.get(method.members or key, [])
        if method.drawing.family == "exact" or not found or (method.members and len(found) < 2):
            continue
        each = tuple(file for _, file in found)
        if method.members:
            units: tuple[Draws, ...] = (Draws(each),)
            rest = tuple(Draws(each[:i] + each[i + 1 :]) for i in range(len(each)) if len(each) > 2)
            replicas, cost = rest or units, _add_cost(found)
        else:
            units = replicas = tuple(Draws((file,)) for file in each)
            cost = _add_cost(found[:1])
        seeds = tuple(task.seed for task, _ in found)
        entries.append(Entry(method, seeds, units, replicas, _list_choices(found), cost))
    return entries


def find_minimum(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Finds where a curve through points (x, y) is lowest: a parabola over log x through the lowest and its neighbours.

    Examples:
        >>> x, y = find_minimum([(2**k, (k - 0.8) ** 2) for k in range(-2, 4)])
        >>> round(math.log2(x), 6), round(y, 6)
        (0.8, 0.0)
    """
    place = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < place < len(points) - 1:
        return points[place]
    (x0, y0), (x1, y1), (_, y2) = points[place - 1 : place + 2]
    step = math.log(x1 / x0)  # the third lies as far on the other side
    curvature, slope = (y0 - 2 * y1 + y2), (y2 - y0) / 2
    if curvature <= 0:
        return x1, y1
    shift = -slope / curvature
    return x1 * math.exp(shift * step), y1 + slope * shift + curvature * shift**2 / 2


def _add_cost(drawn: Drawn) -> Cost:
    checkpoints = [read_checkpoint(checkpoint_path(*task.network)) for task, _ in drawn]
    return Cost(
        passes=sum(len(file.tensors["test"]) for _, file in drawn),
        weights_bytes=sum(w.numel() * w.element_size() for one in checkpoints for w in one.weights.values()),
        statistics_bytes=sum(file.header.get("bytes", 0) for _, file in drawn),
        train_hours=sum(epoch["seconds"] for one in checkpoints for epoch in one.history) / 3600,
    )


def _list_choices(drawn: Drawn) -> tuple[Choice, ...]:
    found = []
    for task, file in drawn:
        tuning = file.header.get("tuning")
        if tuning and task.method.drawing.tuned:
            curve = tuple((spread, loss) for spread, _, loss in tuning["curve"])
            found.append(Choice(task.seed, tuning["spread"], curve))
    return tuple(found)
