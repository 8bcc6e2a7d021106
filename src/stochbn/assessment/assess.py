"""A model and its data → an assessment: fitted, tuned, predicted with and scored, side by side."""

import platform
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import nn

from stochbn.assessment.measure import Part, Target, check_labels, find_labels, measure_cost, run, tidy
from stochbn.assessment.results import Assessment, Method
from stochbn.assessment.scores import Estimate, Resampled, losses
from stochbn.assessment.verdict import describe
from stochbn.curves import find_share, outcomes, uncertainties
from stochbn.decisions import AbstainRule, abstain
from stochbn.distributions.base import Distribution
from stochbn.distributions.fit import fit
from stochbn.distributions.tuning import Tuning
from stochbn.inference.choosing import FEWEST_MISTAKES, choose_nearest
from stochbn.inference.predict import Predictor, check_options
from stochbn.inference.prediction import Link, Prediction
from stochbn.inference.tune import tune
from stochbn.statistics.calls import Call, unwrap
from stochbn.statistics.mini_batches import check_loader

FALSE_ALARMS = 0.05  # of known inputs, at which out-of-domain ones are counted
LABELS = {  # the simplest first
    "plain": "Plain network",
    "tempered": "Plain + temperature",
    "noisy": "Plain + noise",
    "last": "Last layer, as fitted",
    "last-tuned": "Last layer, tuned",
    "sbn": "SBN, as fitted",
    "sbn-tuned": "SBN, tuned",
    "given": "Given statistics, as fitted",
    "given-tuned": "Given statistics, tuned",
}


def assess(
    model: nn.Module,
    test_loader: Iterable[Any],
    *,
    train_loader: Iterable[Any] | None = None,
    stats: Distribution | None = None,
    val_loader: Iterable[Any] | None = None,
    ood_loader: Iterable[Any] | None = None,
    link: Link = "softmax",
    risk: float = 0.01,
    batch_size: int | None = None,
    num_samples: int = 50,
    seed: int = 0,
    class_names: Sequence[str] = (),
    title: str | None = None,
    call: Call | None = None,
    target: Target | None = None,
    progress: bool = True,
) -> Assessment:
    """Finds what a model may be trusted with, and what draws of its batch statistics add. Changes no model.

    The plain network, a temperature, the paper's SBN and draws in the last layer alone are scored on the same test
    data. Validation data tune them and choose among them: the simplest of those within one standard error of the lowest
    NLL; with fewer than ten mistakes among them, the plain network. The test data choose nothing, so that a rule from
    them, when to abstain, keeps its promise.

    Args:
        model: A trained network with BatchNorm layers.
        test_loader: Labelled data that neither training nor tuning has seen: batches `(x, y)`. Read twice or more.
        train_loader: Shuffled training data, to fit to; or pass `stats`.
        stats: What `fit` or `tune` returned, to assess in place of what would be fitted here.
        val_loader: Labelled data that training has not seen. Without it nothing is tuned or compared.
        ood_loader: Inputs of another kind than those of training, with labels or without.
        link: As in `predict`: "softmax" for classes, also of pixels, "sigmoid" for labels, "identity" for regression.
        risk: The error rate that the rule is to promise among the inputs it accepts.
        batch_size: M of training, as in `fit`.
        num_samples: Draws for each prediction.
        seed: Of the draws.
        class_names: A name for each class, for the page.
        title: Of the page; by default the name of the model's class.
        call: As in `fit`: how the model is called on a batch.
        target: Returns the labels of a batch; by default they are the second of a tuple or list.
        progress: Show progress bars.

    Returns:
        An `Assessment`: print it, or `save` it as a page.

    Examples:
        >>> import stochbn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> inputs = [torch.randn(16, 2) for _ in range(30)]
        >>> batches = [(x, model(x).softmax(1).multinomial(1)[:, 0]) for x in inputs]
        >>> found = stochbn.assess(model, batches[:10], train_loader=batches[10:], risk=0.6, progress=False)
        >>> list(found.methods), found.chosen
        (['plain', 'sbn', 'last'], 'last')
        >>> found.num_inputs
        {'train': 320, 'test': 160}
    """
    from stochbn import __version__  # which imports this module

    check_options(num_samples=num_samples, chunk_size=None, link=link)
    if (stats is None) == (train_loader is None):
        given = "neither" if stats is None else "both"
        raise ValueError(f"Expected training data to fit to, or statistics from stochbn.fit, got {given}. Pass one.")
    if not 0 < risk < 1:
        raise ValueError(f"Expected a risk between 0 and 1, got {risk}. Pass 0.01, for example.")
    loaders = {"train": train_loader, "validation": val_loader, "test": test_loader, "out-of-domain": ood_loader}
    check_apart({name: id(loader) for name, loader in loaders.items() if loader is not None})
    job = _Job(
        unwrap(model),
        {name: _keep(loader) for name, loader in loaders.items() if loader is not None},
        link,
        {"num_samples": num_samples, "seed": seed},
        call,
        target,
        progress,
    )
    num_outputs = job.try_out()
    if class_names and len(class_names) != num_outputs:
        raise ValueError(f"Expected a name for each of {num_outputs} classes, got {len(class_names)} names. Pass all.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = {"given": stats.untuned()} if stats is not None else job.fit(batch_size)
        sources = job.tune(fitted, stats)
        predictors = {key: job.prepare(source) for key, source in sources.items()}
        validation, num_mistakes, chosen = job.choose(predictors, default=list(fitted)[-1])
        test = job.run(predictors, "test", chosen)
        other = job.run(predictors, "out-of-domain", chosen) if "out-of-domain" in job.data else None
        rule = _find_rule(test, chosen, risk)
    sizes = {"train": (one := next(iter(fitted.values()))).batch_size * one.num_batches, "validation": validation}
    parts = {"test": test} | ({} if other is None else {"out-of-domain": other})
    sizes |= {name: len(part.predictions["plain"]) for name, part in parts.items()}
    found = Assessment(
        title=title or type(job.model).__name__,
        link=link,
        verdict=(),
        methods=_score(test, other, measure_cost(predictors, job.data["test"])),
        chosen=chosen,
        num_inputs={name: size for name, size in sizes.items() if size},
        rule=rule,
        drift=job.find_drift(next(iter(fitted.values()))),
        warned=tuple(dict.fromkeys([str(one.message) for one in caught] + job.warned())),
        num_samples=num_samples,
        versions={"stochbn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        class_names=tuple(map(str, class_names)),
        predictions={name: part.predictions for name, part in parts.items()},
        labels=test.labels,
        tunings={key: tuning for key, source in sources.items() if (tuning := _tuning_of(source)) is not None},
        pictures={name: (part.most, part.least) for name, part in parts.items() if part.most},
        num_mistakes=num_mistakes,
        source=sources[chosen],
    )
    return replace(found, verdict=tuple(describe(found)))


@dataclass(frozen=True, eq=False)
class _Job:
    """The model, its data, and how they are run."""

    model: nn.Module
    data: dict[str, Iterable[Any]]
    link: Link
    drawing: dict[str, Any]
    call: Call | None
    target: Target | None
    progress: bool
    noted: dict[str, list[str]] = field(default_factory=dict)  # warnings, and the methods that they are of

    def prepare(self, source: Distribution | Tuning | None) -> Predictor:
        return Predictor(self.model, source, link=self.link, call=self.call, keep_samples=False, **self.drawing)

    def try_out(self) -> int:
        """Tries the plain network on a batch of each data set, before anything takes long; returns its outputs' K."""
        plain, num_outputs = self.prepare(None), 1
        for name, loader in self.data.items():
            item = next(iter(loader), None)
            if item is None:
                raise ValueError(f"Expected at least one batch of {name} data, got an empty loader. Pass more.")
            pred = tidy(plain([item]))
            num_outputs = pred.mean.shape[1]
            if name in ("validation", "test"):
                check_labels(pred, find_labels(item, self.target), item, name)
        return num_outputs

    def fit(self, batch_size: int | None) -> dict[str, Distribution]:
        """Fits the paper's SBN, and the last layer as the guide recommends."""
        options: dict[str, Any] = {"batch_size": batch_size, "call": self.call, "progress": self.progress}
        last: dict[str, Any] = {"layers": "last", "family": "empirical", "conditioned": True}
        loader = self.data["train"]
        return {"sbn": fit(self.model, loader, **options), "last": fit(self.model, loader, **last, **options)}

    def tune(
        self, fitted: dict[str, Distribution], given: Distribution | None
    ) -> dict[str, Distribution | Tuning | None]:
        """Lists what to predict with: the plain network, and with validation data all that these can tune."""
        options: dict[str, Any] = {"link": self.link, "call": self.call, "target": self.target}
        options["progress"], loader = self.progress, self.data.get("validation")
        sources: dict[str, Distribution | Tuning | None] = {"plain": None}
        if loader is not None:
            key = "noisy" if self.link == "identity" else "tempered"
            with self.noting(key):
                sources[key] = tune(self.model, None, loader, **options)
        for key, stats in fitted.items():
            sources[key] = stats
            if given is not None and given.tuning is not None:
                sources[f"{key}-tuned"] = given
            elif loader is not None:
                with self.noting(f"{key}-tuned"):
                    sources[f"{key}-tuned"] = tune(self.model, stats, loader, **options)
        return sources

    @contextmanager
    def noting(self, key: str) -> Iterator[None]:
        """Keeps what a method is warned of for the page, once for all methods."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for one in caught:
            self.noted.setdefault(str(one.message), []).append(key)

    def warned(self) -> list[str]:
        """Returns the warnings of methods, each with the names of these."""
        return [f"{'; '.join(LABELS[key] for key in keys)}: {message}" for message, keys in self.noted.items()]

    def choose(self, predictors: dict[str, Predictor], default: str) -> tuple[int, int | None, str]:
        """Returns how many validation inputs there are, how many are mistaken, and the simplest method near the best.

        Without validation data, which are the only ones that may choose, it is the default. As in `tune`, few mistakes
        choose nothing: then it is the plain network.
        """
        if "validation" not in self.data:
            return 0, None, f"{default}-tuned" if f"{default}-tuned" in predictors else default
        part = self.run(predictors, "validation", None)
        assert part.labels is not None
        num_mistakes = None
        if self.link != "identity":
            num_mistakes = int((~outcomes(part.predictions["plain"], part.labels)[1]).any(1).sum())
            if num_mistakes < FEWEST_MISTAKES:
                return len(part.labels), num_mistakes, "plain"
        found = {key: losses(pred, part.labels) for key, pred in part.predictions.items()}
        scored = {key: each for key, each in found.items() if each is not None}
        row = choose_nearest(torch.stack(list(scored.values())), [list(LABELS).index(key) for key in scored])
        return len(part.labels), num_mistakes, list(scored)[row]

    def run(self, predictors: dict[str, Predictor], name: str, shown: str | None) -> Part:
        labelled = name != "out-of-domain"
        return run(
            predictors,
            self.data[name],
            name,
            shown=shown,
            target=self.target,
            needs_labels=labelled,
            progress=self.progress,
        )

    def find_drift(self, fitted: Distribution) -> dict[str, dict[str, tuple[float, float]]]:
        """Measures how far the statistics of each data set are from the running ones; too few data are left out."""
        drift = {"train": fitted.drift(self.model)}
        for name in ("test", "out-of-domain"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of data unlike those of training, or in order: that is the question
                try:
                    options: dict[str, Any] = {"layers": list(fitted.layers), "call": self.call, "progress": False}
                    stats = fit(self.model, self.data[name], batch_size=fitted.batch_size, **options)
                except (KeyError, ValueError):
                    continue
            drift[name] = stats.drift(self.model)
        return drift


def check_apart(parts: Mapping[str, Hashable]) -> None:
    """Refuses the same data for two of training, validation and test: what chose or fitted cannot test.

    Examples:
        >>> check_apart({"train": "a.npz", "test": "b.npz", "out-of-domain": "a.npz"})
    """
    for one, other in combinations(("train", "validation", "test"), 2):
        if one in parts and other in parts and parts[one] == parts[other]:
            raise ValueError(
                f"Expected {one} and {other} data that share no input, got the same for both. Pass data held out."
            )


def _keep(loader: Iterable[Any]) -> Iterable[Any]:
    """Makes data that can be read once readable again."""
    check_loader(loader)
    return list(loader) if isinstance(loader, Iterator) else loader


def _tuning_of(source: Distribution | Tuning | None) -> Tuning | None:
    return source.tuning if isinstance(source, Distribution) else source


def _find_rule(test: Part, chosen: str, risk: float) -> AbstainRule | None:
    """Makes a rule of the test data, which chose nothing; None where an input has more than one answer."""
    pred = test.predictions[chosen]
    if pred.link != "softmax" or pred.mean.dim() != 2:
        return None
    assert test.labels is not None
    return abstain(pred, test.labels, risk)


def _score(test: Part, other: Part | None, seconds: dict[str, float]) -> dict[str, Method]:
    assert test.labels is not None
    others = None if other is None else other.predictions
    resampled = Resampled(test.predictions, test.labels, others)
    # A temperature or a noise level is no more work than nothing.
    seconds = {key: seconds[key if pred.num_samples > 1 else "plain"] for key, pred in test.predictions.items()}
    return {
        key: Method(
            LABELS[key],
            resampled.estimate(key),
            {} if key == "plain" else resampled.compare(key, "plain"),
            find_detected(pred, others[key]) if others is not None and "auroc" in resampled.values[key] else None,
            seconds[key],
            seconds[key] / seconds["plain"],
        )
        for key, pred in test.predictions.items()
    }


def find_detected(known: Prediction, other: Prediction) -> Estimate:
    """Returns how many out-of-domain inputs, in percent, are more uncertain than 95 % of the known ones."""
    threshold = uncertainties(known).quantile(1 - FALSE_ALARMS)
    found = (uncertainties(other) > threshold).double().unsqueeze(1)
    share = find_share(found.mean(0), found, torch.ones_like(found))
    return Estimate(100 * float(share.observed), 100 * float(share.low), 100 * float(share.high))
