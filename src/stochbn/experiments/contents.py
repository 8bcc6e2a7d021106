"""What prediction files and diagnostics hold, and the check that they do, made whenever one is read.

So `report` meets sound files only, and what it would refuse is not current for `evaluate`, which makes it again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from stochbn.experiments.schema import Count, Index, check

LABELS = {"test": "labels", "validation": "labels/validation"}  # out-of-domain inputs have none
GALLERY = ("certain test", "uncertain test", "certain out-of-domain", "uncertain out-of-domain")
_FLOATS = (torch.float16, torch.float32, torch.float64)
_WHOLE = (torch.uint8, torch.int16, torch.int32, torch.int64)
_SUM = 0.05  # by which probabilities may miss 1: float16 keeps three digits of their logarithms


class _Record(TypedDict):
    num_samples: Count
    seconds: float
    commit: str


class _Predictions(TypedDict, total=False):
    options: str
    train_loss: list[float]
    validation_error: list[float]
    methods: dict[str, _Record]
    draws: dict[str, Count]


class Predictions(_Predictions):
    """What the header of a prediction file has to say. Only files of the current format have all of the rest."""

    experiment: str
    recipe: str
    seed: Index
    data: str
    out_of_domain: str
    classes: list[str]
    batch_size: Count
    epochs: Count
    validation_nll: list[float]
    train_seconds: float
    num_samples: Count
    draw_seed: int
    command: str
    commit: str
    versions: dict[str, str]


class _Effect(TypedDict):
    nll: float
    entropy_test: float
    entropy_out_of_domain: float
    auroc: float


class _BySamples(_Effect):
    num_samples: Count


class _ByBatchSize(_Effect):
    batch_size: Count


class _Statistics(TypedDict):
    layers: list[str]
    num_batches: Count
    batch_size: Count


class _Stage(TypedDict):
    lower: tuple[float, float]
    marginal: tuple[float, float]
    gap: tuple[float, float]


class _Bound(TypedDict):
    before: _Stage
    after: _Stage
    num_examples: Count
    num_samples: Count
    batch_size: Count


class _Gallery(TypedDict):
    method: str
    classes: list[str]
    out_of_domain_classes: list[str]


class _Diagnostics(TypedDict, total=False):
    seed: Index
    command: str
    versions: dict[str, str]
    num_curve: TypedDict("NumCurve", {"test": Count, "out-of-domain": Count})  # type: ignore[valid-type]
    by_samples: list[_BySamples]
    by_batch_size: list[_ByBatchSize]
    statistics: _Statistics
    bound: _Bound
    gallery: _Gallery


class Diagnostics(_Diagnostics):
    """What the header of the diagnostics has to say; the measurements are those that its protocol has."""

    network: str
    commit: str


def check_contents(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` unless a file of predictions or of diagnostics is sound. Others are not looked at."""
    if header.get("kind") == "predictions":
        check(header, Predictions, "header")
        _check_predictions(header, tensors)
    elif header.get("kind") == "diagnostics":
        check(header, Diagnostics, "header")
        _check_diagnostics(header, tensors)


def _check_predictions(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    num_classes = len(header["classes"])
    _require(num_classes > 1, "at least 2 classes", "header.classes")
    _require(bool(header["validation_nll"]), "an epoch", "header.validation_nll")
    names = {name: name.split("/") for name in tensors if name not in LABELS.values()}
    methods: dict[str, set[str]] = {}
    for name, pieces in names.items():
        _require(
            len(pieces) == 3 and pieces[2] in ("log_probs", "expected_entropy"), "a known name", f"tensor {name!r}"
        )
        methods.setdefault(pieces[0], set()).add(pieces[1])
    _require(bool(methods), "predictions", "its tensors")
    parts = set.union(*methods.values())
    _require(
        {"test"} <= parts <= {"test", "out-of-domain", "validation"}, "known parts of the data", str(sorted(parts))
    )
    first = next(iter(methods))
    sizes = {part: len(_get(tensors, f"{first}/{part}/expected_entropy", 1)) for part in sorted(parts)}
    for part, name in LABELS.items():
        if part in parts or name in tensors:
            check_indices(tensors, name, (sizes.get(part, 0),), num_classes)
    for method in methods:
        for part, size in sizes.items():
            check_outputs(tensors, f"{method}/{part}", (size, num_classes))


def _check_diagnostics(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for key in ("by_samples", "by_batch_size"):
        _require(header.get(key) != [], "a row", f"header.{key}")
    for part in ("test", "out-of-domain"):
        index = f"exact/{part}/index"
        if index in tensors:
            count = len(_get(tensors, index, 1, dtypes=_WHOLE))
            check_indices(tensors, index, (count,))
            check_outputs(tensors, f"exact/{part}", (count, _get(tensors, f"exact/{part}/log_probs", 2).shape[1]))
    if statistics := header.get("statistics"):
        _require(bool(statistics["layers"]), "a layer", "header.statistics.layers")
        for layer in statistics["layers"]:
            _check_statistics(tensors, f"statistics/{layer}")
    if gallery := header.get("gallery"):
        _require(all(gallery[key] for key in ("classes", "out_of_domain_classes")), "classes", "header.gallery")
        for group in GALLERY:
            _check_gallery(gallery, tensors, group)


def _check_statistics(tensors: Mapping[str, Tensor], name: str) -> None:
    num_channels = _get(tensors, f"{name}/ks", 2).shape[1]
    num_shown = len(_get(tensors, f"{name}/channels", 1, dtypes=_WHOLE))
    check_indices(tensors, f"{name}/channels", (num_shown,), num_channels)
    distances = _get(tensors, f"{name}/ks", 2, (2, num_channels))
    _require(bool(((distances >= 0) & (distances <= 1) | distances.isnan()).all()), "distances up to 1", f"{name}/ks")
    observed = _get(tensors, f"{name}/observed", 3)
    _require(len(observed) > 1, "at least 2 mini-batches", f"{name}/observed")
    _check_finite(observed, f"{name}/observed", (len(observed), 2, num_shown))
    for kind in ("centre", "std"):
        _check_finite(_get(tensors, f"{name}/{kind}", 2), f"{name}/{kind}", (2, num_shown))


def _check_gallery(header: dict[str, Any], tensors: Mapping[str, Tensor], group: str) -> None:
    name = f"gallery/{group}"
    images = _get(tensors, f"{name}/images", 4, dtypes=(torch.uint8,))
    _require(images.shape[1] in (1, 3) and images.numel() > 0, "1 or 3 channels", f"{name}/images")
    count = len(images)
    _check_finite(_get(tensors, f"{name}/entropy", 1), f"{name}/entropy", (count,))
    true = header["classes" if group.endswith(" test") else "out_of_domain_classes"]
    for kind, classes in (("predicted", header["classes"]), ("labels", true)):
        check_indices(tensors, f"{name}/{kind}", (count,), len(classes))


def check_outputs(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> None:
    """Raises unless there are log-probabilities (N, K) that sum to 1, and entropies (N,) that such can have."""
    log_probs, entropy = _get(tensors, f"{name}/log_probs", 2), _get(tensors, f"{name}/expected_entropy", 1)
    _check_finite(log_probs, f"{name}/log_probs", shape)
    _check_finite(entropy, f"{name}/expected_entropy", shape[:1])
    misses = (log_probs.double().exp().sum(1) - 1).abs().max().item()
    _require(misses < _SUM, "probabilities that sum to 1", f"{name}/log_probs")
    highest = math.log(shape[1]) + _SUM
    sound = bool(((entropy > -_SUM) & (entropy < highest)).all())
    _require(sound, f"entropies between 0 and log {shape[1]}", f"{name}/expected_entropy")


def check_indices(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int], number: int | None = None) -> None:
    """Raises unless a tensor holds whole numbers from 0, below a number if one is given."""
    found = _get(tensors, name, len(shape), shape, _WHOLE)
    _require(found.numel() > 0, "at least one number", name)
    low, high = int(found.min()), int(found.max())
    _require(low >= 0 and (number is None or high < number), f"numbers in [0, {number or '∞'})", name)


def _check_finite(found: Tensor, name: str, shape: Sequence[int]) -> None:
    _require(list(found.shape) == list(shape) and found.numel() > 0, f"shape {list(shape)}", name)
    _require(bool(found.isfinite().all()), "finite numbers", name)


def _get(
    tensors: Mapping[str, Tensor],
    name: str,
    num_dims: int,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = _FLOATS,
) -> Tensor:
    _require(name in tensors, "a tensor", name)
    found = tensors[name]
    _require(found.dtype in dtypes, " or ".join(map(str, dtypes)), name)
    _require(found.dim() == num_dims, f"{num_dims} dimensions", name)
    _require(shape is None or list(found.shape) == list(shape), f"shape {list(shape or ())}", name)
    return found


def _require(sound: bool, wanted: str, name: str) -> None:
    if not sound:
        raise ValueError(f"expected {wanted} for {name}")
