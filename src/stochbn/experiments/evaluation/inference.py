"""One trained network → its distribution and its predictions, on whole splits."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import stochbn
from stochbn.distributions.seeds import derive_seed, member_seed
from stochbn.experiments.data.splits import Split, to_inputs
from stochbn.experiments.files import PARTS, pack
from stochbn.experiments.training.recipes import Recipe
from stochbn.experiments.training.train import augment

DRAW_SEED = 0
_INFERENCE_BATCH = 250
_FIT_BATCH = 512


def predict_network(
    network: nn.Module, recipe: Recipe, seed: int, splits: dict[str, Split], *, num_samples: int, progress: bool = False
) -> dict[str, Tensor]:
    """Fits a network's distribution on training data, tunes it on validation data and predicts with it and without.

    Networks of different seeds have draws of their own, as members of an ensemble have in `stochbn.predict`.
    """
    dropout = recipe.dropout > 0
    stats = fit(network, splits["train"], recipe, dropout=dropout, progress=progress)
    tuned = tune(network, stats, splits["validation"], seed=seed, dropout=dropout, progress=progress)
    tensors = {"labels": splits["test"].labels.to(torch.uint8)}
    for part in PARTS:
        for method, source in (("", None), ("sbn", stats), ("tuned", tuned)):
            prediction = predict(
                network,
                source,
                splits[part],
                num_samples=num_samples,
                seed=member_seed(DRAW_SEED, seed),
                dropout=dropout,
                progress=progress,
            )
            name = "+".join(filter(None, ("dropout" if dropout else "", method))) or "plain"
            tensors |= pack(prediction, name, part)
    return tensors


def fit(
    network: nn.Module,
    training: Split,
    recipe: Recipe,
    *,
    batch_size: int | None = None,
    layers: list[str] | None = None,
    family: Any = "factorized",
    dropout: bool = False,
    progress: bool = False,
) -> stochbn.Distribution:
    """Fits on all training data, augmented as in training, with the recipe's mini-batch size or another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DRAW_SEED)  # of dropout and augmentation
        return stochbn.fit(
            network,
            training_batches(training, recipe),
            batch_size=batch_size or recipe.mini_batch_size,
            layers=layers,
            family=family,
            dropout=dropout,
            progress=progress,
        )


def tune(
    network: nn.Module | Sequence[nn.Module],
    stats: Any,
    validation: Split,
    *,
    seed: int = 0,
    num_groups: int = 1,
    dropout: bool = False,
    progress: bool = False,
) -> Any:
    """Chooses the spread of one distribution, or of several together, on validation data; with draws of its own."""
    inputs = input_batches(validation)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The NLL is lowest at")  # the end of a curve is a result too
        return stochbn.tune(
            network,
            stats,
            list(zip(inputs, validation.labels.split(_INFERENCE_BATCH), strict=True)),
            num_groups=num_groups,
            seed=derive_seed(member_seed(DRAW_SEED, seed), "tune"),
            dropout=dropout,
            progress=progress,
        )


def predict(
    network: nn.Module,
    stats: stochbn.Distribution | None,
    split: Split,
    *,
    num_samples: int,
    seed: int = DRAW_SEED,
    dropout: bool = False,
    keep_samples: bool = False,
    progress: bool = False,
) -> stochbn.Prediction:
    """Predicts a whole split; without `stats` there is no SBN."""
    return stochbn.predict(
        network,
        stats,
        input_batches(split),
        num_samples=num_samples,
        seed=seed,
        dropout=dropout,
        keep_samples=keep_samples,
        progress=progress,
    )


def training_batches(training: Split, recipe: Recipe) -> Iterator[Tensor]:
    """Yields the training inputs in a fixed random order, in batches that are larger than mini-batches."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(DRAW_SEED))
    for index in order.split(_FIT_BATCH):
        images = training.images[index]
        yield to_inputs(augment(images) if recipe.augment else images)


def input_batches(split: Split, size: int = _INFERENCE_BATCH) -> list[Tensor]:
    """Returns a split's inputs in batches."""
    return [to_inputs(images) for images in split.images.split(size)]
