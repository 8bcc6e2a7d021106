"""Small networks of every kind with data of theirs, and assessments of them, each made once."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate

COUNTS = {"train": 96, "validation": 80, "test": 112, "out-of-domain": 48}


def batches(x: Tensor, y: Tensor | None = None, size: int = 16) -> list[Any]:
    return list(x.split(size)) if y is None else list(zip(x.split(size), y.split(size), strict=True))


def make(
    model: nn.Module, shape: tuple[int, ...], label: Callable[[Tensor], Tensor], counts: Mapping[str, int] = COUNTS
) -> tuple[nn.Module, dict[str, Any]]:
    """Calibrates a model on noise, and returns it with loaders; labels are made of its own outputs."""
    data = {name: torch.randn(count, *shape) for name, count in counts.items()}
    calibrate(model, data["train"].split(16))
    with torch.no_grad():
        labels = {name: label(model(x)) for name, x in data.items() if name != "out-of-domain"}
    loaders = {
        "train_loader": batches(data["train"], labels["train"]),
        "val_loader": batches(data["validation"], labels["validation"]),
        "test_loader": batches(data["test"], labels["test"]),
        "ood_loader": batches(3 + 2 * data["out-of-domain"]),
    }
    return model, loaders


def draw_class(outputs: Tensor) -> Tensor:
    """Draws a class at every place from (N, K, *)."""
    probs = outputs.softmax(1).movedim(1, -1)
    return probs.flatten(0, -2).multinomial(1).reshape(probs.shape[:-1])


def classes() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8)),
        *(nn.ReLU(), nn.Linear(8, 3)),
    )
    with torch.no_grad():
        model[-1].weight *= 8
    return make(model, (1, 8, 8), draw_class)


def segmentation() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    with torch.no_grad():
        model[-1].weight *= 4
    counts = {"train": 32, "validation": 16, "test": 32, "out-of-domain": 32}
    return make(model, (3, 33, 33), draw_class, counts)  # more pixels than are kept


def labels() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    return make(model, (5,), lambda outputs: (torch.rand_like(outputs) < outputs.sigmoid()).float())


def regression() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
    return make(model, (5,), lambda outputs: outputs + 0.3 * torch.randn_like(outputs))


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "classes": (classes, {"risk": 0.4, "class_names": ["cat", "dog", "owl"]}),
    "segmentation": (segmentation, {}),
    "labels": (labels, {"link": "sigmoid"}),
    "regression": (regression, {"link": "identity"}),
}


def assess_kind(kind: str, without: tuple[str, ...] = ()) -> stochbn.Assessment:
    torch.manual_seed(1)
    build, options = KINDS[kind]
    model, loaders = build()
    given = {name: loader for name, loader in loaders.items() if name not in without}
    return stochbn.assess(model, **given, **options, num_samples=6, progress=False)


@pytest.fixture(scope="session")
def assessed() -> Callable[[str], stochbn.Assessment]:
    kept: dict[str, stochbn.Assessment] = {}

    def find(kind: str) -> stochbn.Assessment:
        if kind not in kept:
            kept[kind] = assess_kind(kind)
        return kept[kind]

    return find
