"""What an assessment found, typed: for the page, for `assessment.json` and to print."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from stochbn.assessment.measure import Picture
from stochbn.assessment.scores import METRICS, Estimate
from stochbn.decisions import AbstainRule
from stochbn.distributions.base import Distribution
from stochbn.distributions.tuning import Tuning
from stochbn.inference.choosing import FEWEST_MISTAKES
from stochbn.inference.prediction import Link, Prediction


@dataclass(frozen=True)
class Method:
    """One way to predict.

    Attributes:
        label: Its name.
        scores: On the test data, by the keys of `assessment.scores.METRICS`.
        differences: To the plain network's, paired; empty for that itself.
        found: The share of out-of-domain inputs that are more uncertain than 95 % of the known ones, or None.
        seconds: For an input.
        cost: The same as a multiple of the plain network's.
    """

    label: str
    scores: dict[str, Estimate]
    differences: dict[str, Estimate]
    found: Estimate | None
    seconds: float
    cost: float


@dataclass(frozen=True, eq=False)
class Assessment:
    """What `stochbn.assess` found about a model. `print` shows the verdict and the scores, `save` writes the page.

    Attributes:
        title: What was assessed.
        link: As in `predict`.
        verdict: What was found, a sentence each; the first is the most important.
        methods: Ways to predict, by key, "plain" first.
        chosen: The key of the one that validation data chose, and that the rule and the pictures are of.
        num_inputs: By part of the data: train, validation, test, out-of-domain.
        rule: When to abstain, from the test data; None where an input has more than one answer.
        drift: By part of the data and layer, as `Distribution.drift` has it.
        warned: What `fit`, `tune` and `abstain` warned of.
        num_samples: Draws.
        num_mistakes: Of the plain network on validation data, in inputs; None for regression, or without such data.
        versions: Of this package, of torch and of Python.
        class_names: Of the classes, or empty.
        predictions: By part of the data and key.
        labels: Of the test data.
        tunings: What was tried on validation data, by key.
        pictures: Of the most and the least certain inputs, by part of the data, where they are images.
        source: What the chosen method predicts with, for `predict` in place of statistics; None for the plain network.
    """

    title: str
    link: Link
    verdict: tuple[str, ...]
    methods: dict[str, Method]
    chosen: str
    num_inputs: dict[str, int]
    rule: AbstainRule | None
    drift: dict[str, dict[str, tuple[float, float]]]
    warned: tuple[str, ...]
    num_samples: int
    versions: dict[str, str]
    class_names: tuple[str, ...] = ()
    predictions: Mapping[str, Mapping[str, Prediction]] = field(default_factory=dict, repr=False)
    labels: Tensor | None = field(default=None, repr=False)
    tunings: Mapping[str, Tuning] = field(default_factory=dict, repr=False)
    pictures: Mapping[str, tuple[list[Picture], list[Picture]]] = field(default_factory=dict, repr=False)
    num_mistakes: int | None = None
    source: Distribution | Tuning | None = field(default=None, repr=False)

    @property
    def has_few_mistakes(self) -> bool:
        """Whether validation data hold too few mistakes to choose a method by."""
        return self.num_mistakes is not None and self.num_mistakes < FEWEST_MISTAKES

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers, as `assessment.json` has them."""
        numbers = {
            "title": self.title,
            "verdict": list(self.verdict),
            "link": self.link,
            "chosen": self.chosen,
            "num_inputs": self.num_inputs,
            "num_samples": self.num_samples,
            "num_mistakes": self.num_mistakes,
            "methods": {key: asdict(method) for key, method in self.methods.items()},
            "metrics": {key: metric.meaning for key, metric in METRICS.items()},
            "rule": None if self.rule is None else asdict(self.rule),
            "drift": self.drift,
            "tunings": {key: tuning.to_dict() for key, tuning in self.tunings.items()},
            "warnings": list(self.warned),
            "versions": self.versions,
        }
        return _finite(numbers)  # type: ignore[no-any-return]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `index.html`, `assessment.json`, the rule `abstain.json` and `chosen.sbn.safetensors` into a folder.

        The rule is there for classes; the last where draws were chosen: it holds the statistics that the rule is for.
        All of them or none; the page needs nothing outside itself. Needs `pip install 'stochbn[plots]'`.

        Returns:
            The path of the page.
        """
        from stochbn.assessment.page import write  # which needs Matplotlib and Jinja; and it lays this class out

        return write(self, Path(folder))

    def __str__(self) -> str:
        keys = [key for key in METRICS if any(key in method.scores for method in self.methods.values())]
        table = [["", *(METRICS[key].label for key in keys), "cost"]]
        for method in self.methods.values():
            scores = method.scores
            cells = [f"{scores[key].value:.{METRICS[key].digits}f}" if key in scores else "—" for key in keys]
            table.append([method.label, *cells, f"{method.cost:.3g}×"])
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
        return "\n".join([*self.verdict, *(f"Warning: {one}" for one in self.warned), "", *lines])


def _finite(value: Any) -> Any:
    """Writes numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
