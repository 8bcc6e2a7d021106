"""Prediction files as `stochbn evaluate` writes them, of networks that were never trained."""

import io
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from stochbn.experiments.files import PARTS, File, diagnostics_path, prediction_path
from stochbn.experiments.methods import METHODS, SPREADS
from stochbn.experiments.report import diagnostic_figures, report
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.report import read_files, write_report
from stochbn.experiments.report.scores import Results

CLASSES = list("0123456789")
LAYERS = ["conv1.norm", "fc.norm"]
NOISE = {"plain": 0.0, "sbn": 0.4, "dropout": 1.0, "dropout+sbn": 1.8}
VOID = {"meta", "img", "br", "link", "hr", "input"}


def _make_files(
    folder: Path,
    *,
    num_plain: int = 3,
    num_dropout: int = 2,
    size: int = 400,
    parts: tuple[str, ...] = PARTS,
    experiment: str = "lenet5",
    spreads: bool = False,
    **header: Any,
) -> Path:
    """Writes prediction files of networks that know most test inputs and nothing of the others.

    With spreads, the plain networks also have the last layer and stage at several of them, as on CIFAR5; validation
    data are then among the parts.
    """
    torch.manual_seed(1)
    parts = (*parts, "validation") if spreads else parts
    labels = {part: torch.randint(10, (size,)) for part in ("test", "validation")}
    known = {part: 9 * F.one_hot(found, 10) * torch.rand(size, 1).sqrt() for part, found in labels.items()}
    evidence = known | {"out-of-domain": torch.zeros(size, 10)}
    noise = NOISE | {METHODS[key].at(k).key: 0.8 * k for key in ("last", "stage") for k in SPREADS if spreads}
    runs = [(experiment, seed, [key for key in noise if "dropout" not in key]) for seed in range(num_plain)]
    runs += [(f"{experiment}-dropout", seed, ["dropout", "dropout+sbn"]) for seed in range(num_dropout)]
    for recipe, seed, methods in runs:
        tensors = {"labels": labels["test"].to(torch.uint8)}
        if spreads:
            tensors["labels/validation"] = labels["validation"].to(torch.uint8)
        for part in parts:
            logits = evidence[part] + 1.5 * torch.randn(size, 10)
            for method in methods:
                samples = (logits + noise[method] * torch.randn(1 if method == "plain" else 8, size, 10)).softmax(2)
                tensors[f"{method}/{part}/log_probs"] = samples.mean(0).log().half()
                tensors[f"{method}/{part}/expected_entropy"] = torch.special.entr(samples).sum(2).mean(0).half()
        described = {
            "kind": "predictions",
            "experiment": experiment,
            "recipe": recipe,
            "seed": seed,
            "num_samples": 8,
            "batch_size": 16,
            "epochs": 5,
            "data": "mnist",
            "out_of_domain": "notmnist",
            "classes": CLASSES,
            "validation_nll": [0.1 / (1 + epoch) for epoch in range(5)],
            "train_seconds": 90.0,
            "draw_seed": 0,
            "command": "stochbn evaluate lenet5",
            "commit": "abc123",
            "versions": {"stochbn": "0.1", "torch": "2"},
        }
        File(described | header, tensors).write(prediction_path(folder, recipe, seed))
    return folder


def _make_diagnostics(folder: Path, *, num_batches: int = 60, num_exact: int = 50) -> Path:
    torch.manual_seed(2)
    file = File.read(prediction_path(folder, "lenet5", 0))
    tensors = {"labels": file.tensors["labels"]}
    for part in PARTS:
        tensors[f"exact/{part}/index"] = torch.arange(num_exact)
        for name in ("log_probs", "expected_entropy"):
            tensors[f"exact/{part}/{name}"] = file.tensors[f"sbn/{part}/{name}"][:num_exact]
    for layer in LAYERS:
        observed = torch.randn(num_batches, 2, 3, dtype=torch.float64)
        observed[:, :, 2] = 0.5  # a dead channel
        distances = torch.rand(2, 20, dtype=torch.float64) / 10
        distances[:, 19] = math.nan
        tensors |= {
            f"statistics/{layer}/channels": torch.tensor([0, 9, 19]),
            f"statistics/{layer}/observed": observed.float(),
            f"statistics/{layer}/centre": observed.mean(0),
            f"statistics/{layer}/std": observed.std(0),
            f"statistics/{layer}/ks": distances,
        }
    for group in diagnostic_figures.GALLERY:
        tensors |= {
            f"gallery/{group}/images": torch.randint(256, (12, 1, 28, 28), dtype=torch.uint8),
            f"gallery/{group}/entropy": torch.linspace(0, 2, 12),
            f"gallery/{group}/predicted": torch.arange(12).remainder(10).to(torch.uint8),
            f"gallery/{group}/labels": torch.zeros(12, dtype=torch.uint8),
        }
    rows = [
        {"nll": 0.1 / n, "error": 0.01, "entropy_test": 0.1, "entropy_out_of_domain": 0.5, "auroc": 0.9}
        for n in (1, 2, 4)
    ]
    stage = {"lower": [-0.5, 0.01], "marginal": [-0.4, 0.01], "gap": [0.1, 0.002]}
    header = {
        "kind": "diagnostics",
        "network": "lenet5 seed 0",
        "statistics": {"layers": LAYERS, "num_batches": num_batches, "batch_size": 16},
        "gallery": {
            "method": "Deep Ensembles (3) + SBN",
            "classes": CLASSES,
            "out_of_domain_classes": list("ABCDEFGHIJ"),
        },
        "bound": {"before": stage, "after": stage, "num_examples": 50, "num_samples": 8, "batch_size": 16},
        "by_samples": [{"num_samples": n, **row} for n, row in zip((1, 10, 50), rows, strict=True)],
        "by_batch_size": [{"batch_size": n, **row} for n, row in zip((8, 16, 32), rows, strict=True)],
        "command": "stochbn evaluate lenet5",
        "commit": "abc123",
        "versions": {"stochbn": "0.1"},
    }
    File(header, tensors).write(diagnostics_path(folder))
    return folder


class Tags(HTMLParser):
    """Checks that every tag is closed in order, and keeps images, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.images, self.targets, self.ids, self.tables, self.words = [], [], [], set(), 0, []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(attrs)
        if tag == "table":
            self.tables += 1
        if "id" in attrs:
            assert attrs["id"] not in self.ids
            self.ids.add(attrs["id"])
        self.targets += [attrs[key] for key in ("href", "src") if key in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def _parse(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text("utf-8"))
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture(scope="session")
def make_files() -> Callable[..., Path]:
    return _make_files


@pytest.fixture(scope="session")
def make_diagnostics() -> Callable[..., Path]:
    return _make_diagnostics


@pytest.fixture(scope="session")
def parse() -> Callable[[Path], Tags]:
    return _parse


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def unrendered(monkeypatch):
    """Leaves out what takes most of the time, where a test does not look at the figures."""
    monkeypatch.setattr(report, "render", lambda figure: {"png": b"", "svg": b"<svg/>"})


@pytest.fixture(scope="session")
def lenet5(tmp_path_factory) -> Path:
    """A folder with all files that there can be in LeNet-5's."""
    return _make_diagnostics(_make_files(tmp_path_factory.mktemp("lenet5")))


@pytest.fixture(scope="session")
def whole(lenet5) -> Path:
    """The same with its report, figures included."""
    write_report(lenet5, console=Console(file=io.StringIO(), width=200))
    return lenet5


@pytest.fixture(scope="session")
def results(lenet5) -> Results:
    return collect(read_files(lenet5)[0])


@pytest.fixture(scope="session")
def diagnostics(lenet5) -> File:
    return read_files(lenet5)[1]


@pytest.fixture(scope="session")
def cifar5(tmp_path_factory) -> Path:
    """A folder with what CIFAR5's files hold: validation data, and the end of each network at several spreads."""
    header = {"data": "cifar5", "out_of_domain": "cifar5", "train_loss": [0.2 / (1 + epoch) for epoch in range(5)]}
    return _make_files(tmp_path_factory.mktemp("vgg11"), experiment="vgg11", spreads=True, **header)
