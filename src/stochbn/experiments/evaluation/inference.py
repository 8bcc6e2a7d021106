"""One trained network → its distribution and its predictions, on whole splits.

`options` are those of the functions of the same name in `stochbn`.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import stochbn
from stochbn.distributions.draws import join_draws
from stochbn.distributions.seeds import derive_seed, member_seed
from stochbn.experiments.data.splits import Split, to_inputs
from stochbn.experiments.files import DRAW_SEED
from stochbn.experiments.methods import Drawing
from stochbn.experiments.training.networks import LAST_STAGES
from stochbn.experiments.training.recipes import Recipe
from stochbn.experiments.training.train import augment
from stochbn.inference.engine.sampling import Source
from stochbn.inference.prediction import Average
from stochbn.statistics.layers import all_batch_norms

_INFERENCE_BATCH = 250
_FIT_BATCH = 512


@dataclass(eq=False)
class TrainedNetwork:
    """A trained network with its data, and the distributions that methods draw from, each fitted once.

    Networks of different seeds have draws of their own, as members of an ensemble have in `stochbn.predict`.
    """

    network: nn.Module  # in any mode
    recipe: Recipe  # it was trained by
    seed: int  # it was trained with
    splits: Mapping[str, Split]  # parts of the data by name: "train" to fit on, "validation" to tune on
    # How many mini-batches the statistics of real mini-batches are taken from; by default from all
    num_fit_batches: int | None = None
    progress: bool = False  # whether to show progress bars

    def __post_init__(self) -> None:
        self.distribution = cache(self._distribution)
        self._fit = cache(self._fit_once)

    def _distribution(self, drawing: Drawing) -> stochbn.Distribution | None:
        """Returns what a method draws from, tuned on validation data where it is to be; None without SBN."""
        if drawing.family is None:
            return None
        if drawing.family == "exact" or drawing.apart:
            raise ValueError(f"Expected a distribution of one network as it was fitted, got {drawing}.")
        stats = replace(self._fit(drawing.family, drawing.layers, drawing.dropout), conditioned=drawing.conditioned)
        if drawing.spread is not None:
            return replace(stats, tuning=stochbn.Tuning(drawing.spread))
        if not drawing.tuned:
            return stats
        options: dict[str, Any] = {"dropout": drawing.dropout, "progress": self.progress}
        options |= {"choose": "both"} if drawing.tempered else {}
        return tune(self.network, stats, self.splits["validation"], seed=self.seed, **options)

    def _fit_once(self, family: str, layers: str, dropout: bool) -> stochbn.Distribution:
        chosen = {
            "all": None,
            "stage": LAST_STAGES[self.recipe.network],
            "last": list(all_batch_norms(self.network))[-1:],
        }
        num_batches = self.num_fit_batches if family == "empirical" else None
        options: dict[str, Any] = {"num_batches": num_batches, "dropout": dropout, "progress": self.progress}
        return fit(self.network, self.splits["train"], self.recipe, layers=chosen[layers], family=family, **options)

    def num_draws(self, drawing: Drawing, at_most: int) -> int:
        """Returns how many networks a method draws: one without noise, each mini-batch that was kept at most once."""
        stats = self.distribution(drawing)
        if stats is None and not drawing.dropout:
            return 1
        return min(at_most, len(stats.observations)) if isinstance(stats, stochbn.Empirical) else at_most

    def predict(self, drawing: Drawing, split: Split, *, num_samples: int, **options: Any) -> stochbn.Prediction:
        """Predicts a whole split by a method, with `num_draws(drawing, num_samples)` networks."""
        options |= {"num_samples": self.num_draws(drawing, num_samples), "dropout": drawing.dropout}
        options |= {"seed": member_seed(DRAW_SEED, self.seed), "progress": self.progress}
        return predict(self.network, self.distribution(drawing), split, **options)

    def predict_together(
        self, drawings: Sequence[Drawing], split: Split, *, num_samples: int, **options: Any
    ) -> list[stochbn.Prediction]:
        """Predicts by methods that differ in their spread alone, as `predict` would one by one.

        What comes before the first drawn layer is then computed once for all of them. Where the last layer alone is
        drawn that is nearly everything.
        """
        if len(drawings) == 1:
            return [self.predict(drawings[0], split, num_samples=num_samples, **options)]
        count, seed = self.num_draws(drawings[0], num_samples), member_seed(DRAW_SEED, self.seed)
        sources = [stats for drawing in drawings if (stats := self.distribution(drawing)) is not None]
        draws = join_draws([stats.sample(count, seed=seed) for stats in sources])
        outputs = predict(self.network, draws, split, link="identity", keep_samples=True, **options).samples
        assert outputs is not None
        predictions = []
        for part in outputs.split(count):  # (S, N, K)
            average = Average("softmax", keep_samples=False)
            average.add(part, 1 / count)
            predictions.append(average.prediction())
        return predictions


def fit(
    network: nn.Module, training: Split, recipe: Recipe, *, batch_size: int | None = None, **options: Any
) -> stochbn.Distribution:
    """Fits on all training data, augmented as in training, with the recipe's mini-batch size or another."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # The recipe has the size, and layers count steps of the optimiser, each of several ghost batches.
        warnings.filterwarnings("ignore", message="The model has seen")
        torch.manual_seed(DRAW_SEED)  # of dropout and augmentation
        options = {"progress": False, "batch_size": batch_size or recipe.mini_batch_size} | options
        return stochbn.fit(network, training_batches(training, recipe), **options)


def tune(
    network: nn.Module, stats: stochbn.Distribution, validation: Split, *, seed: int = 0, **options: Any
) -> stochbn.Distribution:
    """Chooses the spread of a distribution on validation data, with draws of its own."""
    loader = list(zip(input_batches(validation), validation.labels.split(_INFERENCE_BATCH), strict=True))
    # The spread alone: a temperature is a method of its own, which the study sets beside each of the others.
    own = {"choose": "spread", "progress": False, "seed": derive_seed(member_seed(DRAW_SEED, seed), "tune")}
    with warnings.catch_warnings():
        # The end of a curve is a result too, and so is a fitted spread that stands; the report says so.
        for message in ("The NLL is lowest at", "Held-out data with"):
            warnings.filterwarnings("ignore", message=message)
        return stochbn.tune(network, stats, loader, **own | options)


def predict(network: nn.Module, stats: Source, split: Split, **options: Any) -> stochbn.Prediction:
    """Predicts a whole split; without `stats` there is no SBN. Draws are averaged, not kept, unless options say so."""
    return stochbn.predict(network, stats, input_batches(split), **{"seed": DRAW_SEED, "keep_samples": False} | options)


def infer_exactly(
    network: nn.Module, recipe: Recipe, training: Split, split: Split, **options: Any
) -> stochbn.Prediction:
    """Predicts by exact inference (eq. 3), with mini-batches of training data of the recipe's size."""
    options = {"batch_size": recipe.mini_batch_size, "seed": DRAW_SEED} | options
    return stochbn.exact_predict(network, training_batches(training, recipe), input_batches(split), **options)


def training_batches(training: Split, recipe: Recipe) -> Iterator[Tensor]:
    """Yields the training inputs in a fixed random order, in batches that are larger than mini-batches."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(DRAW_SEED))
    for index in order.split(_FIT_BATCH):
        images = training.images[index]
        yield to_inputs(augment(images) if recipe.augment else images)


def input_batches(split: Split, size: int = _INFERENCE_BATCH) -> list[Tensor]:
    """Returns a split's inputs in batches."""
    return [to_inputs(images) for images in split.images.split(size)]
