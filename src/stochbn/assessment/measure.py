"""Loaders × ways to predict → predictions, labels and pictures, from one pass over each loader; and what they cost.

All methods see a batch before the next is read, so that predictions are paired whatever order a loader has.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stochbn.curves import outcomes, uncertainties
from stochbn.inference.held_out import like_outputs
from stochbn.inference.predict import Predictor
from stochbn.inference.prediction import Prediction, join
from stochbn.statistics.calls import without_labels
from stochbn.statistics.items import describe, num_examples, rows, tensors_in
from stochbn.statistics.mini_batches import length
from stochbn.statistics.progress import progress_bar

MAX_PLACES = 1024  # of an input: as many of its pixels are kept, drawn at random
NUM_PICTURES = 6  # of the most and of the least certain
NUM_TIMED = 128  # inputs at most
REPEATS = 3

Target = Callable[[Any], Tensor]


@dataclass(frozen=True, eq=False)
class Picture:
    """An input that is an image, with what was predicted.

    Attributes:
        pixels: (C, H, W) between 0 and 1, with C of 1 or 3.
        uncertainty: Its mean entropy, or standard deviation.
        index: Its place in the data.
        predicted: Outputs: of a class its index, else empty.
        label: The same of the truth.
        map: (H, W) entropies of a segmentation, or None.
    """

    pixels: Tensor
    uncertainty: float
    index: int
    predicted: str = ""
    label: str = ""
    map: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """One data set: predictions by method, labels or None, and pictures of the most and the least certain inputs."""

    predictions: dict[str, Prediction]
    labels: Tensor | None
    most: list[Picture]
    least: list[Picture]


def find_labels(item: Any, target: Target | None) -> Tensor | None:
    """Returns the labels of a batch, or None: by default the second of a tuple or list."""
    if target is not None:
        return target(item).cpu()
    if isinstance(item, (tuple, list)) and len(item) > 1 and isinstance(item[1], Tensor) and item[1].dim():
        return item[1].cpu()
    return None


def check_labels(pred: Prediction, labels: Tensor | None, item: Any, name: str) -> Tensor:
    """Refuses labels that are not there, or are none of the prediction's; returns the others."""
    if labels is None:
        raise ValueError(
            f"Expected labels in the {name} data, batches (x, y), got {describe(item)}. Pass target=, for example "
            "target=lambda batch: batch['labels']."
        )
    if pred.link == "identity":
        like_outputs(labels, pred.mean, pred.link)
    elif pred.link == "softmax" and labels.is_floating_point():
        raise ValueError(
            f"Expected class indices as labels in the {name} data, got {labels.dtype}. Pass link='sigmoid' for labels "
            "of 0 and 1, or link='identity' for regression."
        )
    else:
        outcomes(pred, labels)
        if pred.link == "sigmoid" and not ((labels == 0) | (labels == 1)).all():
            raise ValueError(
                f"Expected labels of 0 and 1 for link='sigmoid' in the {name} data, got {labels.min()} to "
                f"{labels.max()}. Pass link='softmax' for class indices."
            )
    return labels


def run(
    predictors: Mapping[str, Predictor],
    loader: Iterable[Any],
    name: str,
    *,
    shown: str | None = None,
    target: Target | None = None,
    needs_labels: bool = True,
    progress: bool = False,
) -> Part:
    """Predicts a data set with every method, and keeps pictures by the uncertainty of the one to be shown."""
    parts: dict[str, list[Prediction]] = {key: [] for key in predictors}
    labels: list[Tensor] = []
    most: list[Picture] = []
    least: list[Picture] = []
    start, generator = 0, torch.Generator().manual_seed(0)
    with progress_bar(f"assess {name}", "batch", length(loader), shown=progress) as bar:
        for item in loader:
            found = find_labels(item, target) if needs_labels else None  # there may be none for target to find
            places: Tensor | None = None
            for key, predictor in predictors.items():
                pred = tidy(predictor([item]))
                if key == next(iter(predictors)):
                    places = _choose_places(pred, generator)
                    if needs_labels:
                        labels.append(_take_labels(check_labels(pred, found, item, name), pred, places))
                if key == shown:
                    pictures = _picture(item, pred, found, start)
                    most = sorted([*most, *pictures], key=lambda one: one.uncertainty)[:NUM_PICTURES]
                    least = sorted([*least, *pictures], key=lambda one: -one.uncertainty)[:NUM_PICTURES]
                parts[key].append(_take(pred, places))
            start += len(pred)
            bar.update()
    joined = {key: replace(join(found), noise=found[0].noise) for key, found in parts.items() if found}
    if not joined:
        raise ValueError(f"Expected at least one batch of {name} data, got an empty loader. Pass more.")
    return Part(joined, torch.cat(labels) if labels else None, most, least)


def measure_cost(predictors: Mapping[str, Predictor], loader: Iterable[Any]) -> dict[str, float]:
    """Returns the seconds that each method takes for an input, the best of some calls on the first few."""
    item = next(iter(loader))
    batch = [rows(item, 0, min(NUM_TIMED, num_examples(item)))]
    count = num_examples(batch[0])
    seconds = {}
    for key, predictor in predictors.items():
        predictor(batch)  # captures
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            predictor(batch)
            times.append(time.perf_counter() - start)
        seconds[key] = min(times) / count
    return seconds


def tidy(pred: Prediction) -> Prediction:
    """Returns a prediction on the CPU, without draws; outputs (N,) become (N, 1), as all that follows counts them."""

    def take(values: Tensor) -> Tensor:
        values = values.detach().cpu()
        return values.unsqueeze(1) if pred.mean.dim() == 1 else values

    expected = None if pred.expected_entropy is None else take(pred.expected_entropy)
    return replace(pred, mean=take(pred.mean), std=take(pred.std), samples=None, expected_entropy=expected)


def _choose_places(pred: Prediction, generator: torch.Generator) -> Tensor | None:
    """Returns some of the places of an input, where there are too many to keep; None for all."""
    count = pred.mean[0, 0].numel() if pred.mean.dim() > 2 else 1
    return torch.randint(count, (MAX_PLACES,), generator=generator) if count > MAX_PLACES else None


def _take(pred: Prediction, places: Tensor | None) -> Prediction:
    """Keeps some places of a prediction (N, K, *)."""
    if places is None:
        return pred

    def take(values: Tensor | None, first: int) -> Tensor | None:
        return None if values is None else values.flatten(first)[..., places]

    expected = take(pred.expected_entropy, 2 if pred.link == "sigmoid" else 1)
    mean, std = take(pred.mean, 2), take(pred.std, 2)
    assert mean is not None
    assert std is not None
    return replace(pred, mean=mean, std=std, expected_entropy=expected)


def _take_labels(labels: Tensor, pred: Prediction, places: Tensor | None) -> Tensor:
    """Keeps the same places of labels, (N, *) of classes, else in the shape of outputs."""
    if pred.link != "softmax":
        labels = like_outputs(labels, pred.mean, pred.link)
    return labels if places is None else labels.flatten(1 if pred.link == "softmax" else 2)[..., places]


def _picture(item: Any, pred: Prediction, labels: Tensor | None, start: int) -> list[Picture]:
    """Returns the most and the least certain inputs of a batch as pictures; none where inputs are no images."""
    images = next(iter(tensors_in(without_labels(item))), None)
    if images is None or images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 2:
        return []
    values = uncertainties(pred)
    order = values.argsort()
    chosen = torch.cat([order[:NUM_PICTURES], order[-NUM_PICTURES:]]).unique().tolist()
    entropies = pred.entropy if pred.link == "softmax" and pred.mean.dim() == 4 else None
    found = []
    for place in chosen:
        pixels = images[place].detach().cpu().double()
        low, high = pixels.min(), pixels.max()
        found.append(
            Picture(
                (pixels - low) / (high - low).clamp_min(1e-12),
                float(values[place]),
                start + place,
                _name(pred, pred.mean[place]),
                "" if labels is None else _name_label(pred, labels[place]),
                None if entropies is None else entropies[place],
            )
        )
    return found


def _name(pred: Prediction, outputs: Tensor) -> str:
    """Writes what was predicted: the index of a class, those of labels, or numbers; nothing for many places."""
    if outputs.dim() != 1:
        return ""
    if pred.link == "softmax":
        return str(int(outputs.argmax()))
    if pred.link == "sigmoid":
        return " ".join(str(k) for k in (outputs > 0.5).nonzero().flatten().tolist()) or "none"
    return ", ".join(f"{value:.3g}" for value in outputs.tolist())


def _name_label(pred: Prediction, label: Tensor) -> str:
    if pred.mean.dim() > 2:
        return ""
    if pred.link == "softmax":
        return str(int(label))
    if pred.link == "sigmoid":
        return " ".join(str(k) for k in label.nonzero().flatten().tolist()) or "none"
    return ", ".join(f"{value:.3g}" for value in label.reshape(-1).tolist())
