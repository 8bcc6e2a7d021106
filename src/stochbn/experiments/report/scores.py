"""Predictions → every number of the report. Pure functions.

A method that needs one network is scored on each seed's: the mean, ± the standard deviation over seeds. Deep Ensembles
are one ensemble of all plain networks: its score, ± the standard deviation over the ensembles that leave one out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score  # type: ignore[import-untyped]
from torch import Tensor

from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import PARTS, File, average, unpack
from stochbn.uncertainty import brier, ece, entropy, error, nll

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A column of the tables: its key in `scores.json`, label, digits, better way, data and definition."""

    key: str
    label: str
    digits: int
    better: Literal["lower", "higher"] | None
    parts: tuple[str, ...]
    meaning: str


_TEST, _OTHER = PARTS[:1], PARTS[1:]
METRICS = (
    Metric("error_percent", "Error, %", 2, "lower", _TEST, "wrong classes on the test data"),
    Metric("nll", "NLL", 4, "lower", _TEST, "mean −log p(y | x) on the test data, in nats"),
    Metric("brier", "Brier", 4, "lower", _TEST, "mean Σ (p − [k = y])² over the classes k, between 0 and 2"),
    Metric("ece", "ECE", 4, "lower", _TEST, "|accuracy − confidence| in 15 equal bins of confidence, by their size"),
    Metric("entropy_test", "Mean entropy, known", 4, None, _TEST, "of the predictive mean on the test data, in nats"),
    Metric(
        "entropy_out_of_domain",
        "Median entropy, out-of-domain",
        3,
        "higher",
        _OTHER,
        "of the predictive mean, out of domain",
    ),
    Metric("auroc_entropy", "AUROC, entropy", 4, "higher", PARTS, "out-of-domain (positive) against known"),
    Metric("aupr_entropy", "AUPR, entropy", 4, "higher", PARTS, "average precision of the same"),
    Metric("fpr95_entropy", "FPR95, entropy", 4, "lower", PARTS, "known share above what 95 % of out-of-domain reach"),
    Metric("auroc_information", "AUROC, mutual information", 4, "higher", PARTS, "by the draws' disagreement"),
    Metric("aupr_information", "AUPR, mutual information", 4, "higher", PARTS, "by the draws' disagreement"),
    Metric("fpr95_information", "FPR95, mutual information", 4, "lower", PARTS, "by the draws' disagreement"),
)


@dataclass(frozen=True)
class Score:
    """A number, its standard deviation where there is one, and the number of inputs behind it."""

    value: float
    std: float | None
    num_inputs: int


Scores = dict[str, dict[str, Score]]  # by method and metric


@dataclass(frozen=True, eq=False)
class Output:
    """Predictions on one part of the data: probabilities (N, K) and, if there are several draws, their mean entropy."""

    probs: Tensor
    expected_entropy: Tensor | None = None

    @cached_property
    def entropy(self) -> Values:
        """Entropy of each prediction, (N,)."""
        return _numpy(entropy(self.probs))

    @cached_property
    def information(self) -> Values | None:
        """Mutual information between prediction and draw, (N,); one network alone has none."""
        if self.expected_entropy is None:
            return None
        return np.maximum(self.entropy - _numpy(self.expected_entropy), 0)


@dataclass(frozen=True, eq=False)
class Method:
    """A method's predictions.

    Attributes:
        name: As in the tables.
        seeds: Of the networks it uses.
        outputs: By part of the data, one for each network; for an ensemble there is one.
        replicas: What the ± is the standard deviation over.
        spread: That, in words.
    """

    name: str
    seeds: tuple[int, ...]
    outputs: tuple[dict[str, Output], ...]
    replicas: tuple[dict[str, Output], ...]
    spread: str

    def pooled_entropy(self, part: str) -> Values:
        """Returns the entropies that all its networks give a part of the data, in one array."""
        return np.concatenate([output[part].entropy for output in self.outputs])


@dataclass(frozen=True, eq=False)
class Results:
    """The prediction files of one experiment: their common header, the test labels (N,), and the methods by name."""

    header: dict[str, Any]
    labels: Tensor
    methods: dict[str, Method]
    has_out_of_domain: bool


def collect(files: Sequence[File]) -> Results:
    """Joins the prediction files of one experiment into methods; an ensemble needs two plain networks.

    Raises:
        DataError: The files are not all of one experiment, setting and test set, or one lacks a tensor.
    """
    for key in ("experiment", "options", "data", "out_of_domain", "classes", "num_samples", "draw_seed"):
        found = sorted({str(file.header.get(key)) for file in files})
        if len(found) > 1:
            raise DataError(
                f"Expected prediction files of one experiment, got {key} {' and '.join(found)}. "
                "Keep each experiment in a folder of its own, or evaluate again."
            )
    has_out_of_domain = all(any("/out-of-domain/" in name for name in file.tensors) for file in files)
    parts = PARTS if has_out_of_domain else PARTS[:1]

    def read(method: str) -> dict[int, dict[str, tuple[Tensor, Tensor]]]:
        having = {file.header["seed"]: file for file in files if f"{method}/test/log_probs" in file.tensors}
        return {seed: {part: unpack(having[seed], method, part) for part in parts} for seed in sorted(having)}

    try:
        labels = [file.tensors["labels"].long() for file in files]
        if any(not torch.equal(other, labels[0]) for other in labels):
            raise DataError("Expected prediction files on one test set, got different labels. Evaluate again.")
        plain, sbn = read("plain"), read("sbn")
        methods = [
            *_each("One network", plain),
            *_each("SBN", sbn),
            *_each("Tuned SBN", read("tuned")),
            *_ensemble("Deep Ensembles", plain),
            *_ensemble("Deep Ensembles + SBN", sbn),
            *_each("Dropout", read("dropout")),
            *_each("Dropout + SBN", read("dropout+sbn")),
            *_each("Dropout + tuned SBN", read("dropout+tuned")),
        ]
    except KeyError as missing:
        raise DataError(f"Expected {missing} in every prediction file. Evaluate again.") from missing
    return Results(files[0].header, labels[0], {method.name: method for method in methods}, has_out_of_domain)


def measure(output: dict[str, Output], labels: Tensor) -> dict[str, float]:
    """Scores one set of predictions: every metric that its parts of the data allow.

    Example:
        >>> measure({"test": Output(torch.tensor([[0.8, 0.2], [0.8, 0.2]]))}, torch.tensor([0, 1]))["error_percent"]
        50.0
    """
    known, strange = output["test"], output.get("out-of-domain")
    scores = {
        "error_percent": 100 * error(known.probs, labels).item(),
        "nll": nll(known.probs, labels).item(),
        "brier": brier(known.probs, labels).item(),
        "ece": ece(known.probs, labels).item(),
        "entropy_test": float(np.mean(known.entropy)),
    }
    if strange is not None:
        scores["entropy_out_of_domain"] = float(np.median(strange.entropy))
        scores |= {f"{name}_entropy": score for name, score in detect(known.entropy, strange.entropy).items()}
        if known.information is not None and strange.information is not None:
            found = detect(known.information, strange.information)
            scores |= {f"{name}_information": score for name, score in found.items()}
    return scores


def detect(known: Values, strange: Values) -> dict[str, float]:
    """Scores how well an uncertainty tells out-of-domain inputs, the positive class, from known ones.

    FPR95 is the share of known inputs at or above the highest threshold that at least 95 % of the others reach.

    Example:
        >>> detect(np.array([0.1, 0.2, 0.5]), np.array([0.4, 0.9]))["fpr95"]
        0.3333333333333333
    """
    truth = np.repeat([0, 1], [len(known), len(strange)])
    values = np.concatenate([known, strange])
    threshold = np.sort(strange)[len(strange) * 5 // 100]  # n − ⌈0.95 n⌉, in whole numbers
    return {
        "auroc": float(roc_auc_score(truth, values)),
        "aupr": float(average_precision_score(truth, values)),
        "fpr95": float(np.mean(known >= threshold)),
    }


def score(results: Results) -> Scores:
    """Scores every method: by its name and the metric's key. A metric that has no meaning for a method is left out."""
    table = {}
    for method in results.methods.values():
        found = [measure(output, results.labels) for output in method.outputs]
        varied = found if method.replicas is method.outputs else [measure(o, results.labels) for o in method.replicas]
        counts = {part: len(output.probs) for part, output in method.outputs[0].items()}
        table[method.name] = {
            metric.key: Score(
                float(np.mean([scores[metric.key] for scores in found])),
                float(np.std([scores[metric.key] for scores in varied], ddof=1)) if len(varied) > 1 else None,
                sum(counts[part] for part in metric.parts),
            )
            for metric in METRICS
            if metric.key in found[0]
        }
    return table


def ecdf(values: Values, thresholds: Values) -> Values:
    """Returns the share of values at or below each threshold.

    Example:
        >>> ecdf(np.array([1.0, 2.0]), np.array([0.5, 1.0, 3.0]))
        array([0. , 0.5, 1. ])
    """
    return np.searchsorted(np.sort(values), thresholds, side="right") / len(values)


def select_exact(results: Results, diagnostics: File) -> Results | None:
    """Returns exact inference (eq. 3) beside the same network, plain and with SBN, on the inputs that it was run on."""
    seed = int(diagnostics.header["network"].rsplit(" ", 1)[1])
    one, sbn = results.methods.get("One network"), results.methods.get("SBN")
    parts = [part for part in PARTS if f"exact/{part}/index" in diagnostics.tensors]
    if not results.has_out_of_domain:
        parts = parts[:1]
    if "test" not in parts or one is None or sbn is None or seed not in one.seeds or seed not in sbn.seeds:
        return None
    rows = {part: diagnostics.tensors[f"exact/{part}/index"] for part in parts}
    methods = {}
    for method in (one, sbn):
        whole = method.outputs[method.seeds.index(seed)]
        output: dict[str, Output] = {part: _take(whole[part], index) for part, index in rows.items()}
        methods[method.name] = Method(method.name, (seed,), (output,), (output,), "")
    exact: dict[str, Output] = {part: Output(*unpack(diagnostics, "exact", part)) for part in parts}
    methods["Exact (eq. 3)"] = Method("Exact (eq. 3)", (seed,), (exact,), (exact,), "")
    return Results(results.header, results.labels[rows["test"]], methods, len(parts) > 1)


def _each(name: str, networks: dict[int, dict[str, tuple[Tensor, Tensor]]]) -> list[Method]:
    outputs = tuple(
        {part: Output(probs, None if name == "One network" else h) for part, (probs, h) in network.items()}
        for network in networks.values()
    )
    return [Method(name, tuple(networks), outputs, outputs, f"{len(outputs)} seeds")] if outputs else []


def _ensemble(name: str, networks: dict[int, dict[str, tuple[Tensor, Tensor]]]) -> list[Method]:
    members = list(networks.values())
    if len(members) < 2:
        return []

    def join(chosen: list[dict[str, tuple[Tensor, Tensor]]]) -> dict[str, Output]:
        return {part: Output(*average([member[part] for member in chosen])) for part in chosen[0]}

    whole = (join(members),)
    if len(members) < 3:  # with one left out there is no ensemble
        return [Method(name, tuple(networks), whole, whole, "")]
    without_one = tuple(join(members[:i] + members[i + 1 :]) for i in range(len(members)))
    spread = f"the {len(members)} ensembles of {len(members) - 1}"
    return [Method(name, tuple(networks), whole, without_one, spread)]


def _take(output: Output, index: Tensor) -> Output:
    h = output.expected_entropy
    return Output(output.probs[index], None if h is None else h[index])


def _numpy(values: Tensor) -> Values:
    return np.asarray(values.numpy(), dtype=np.float64)
