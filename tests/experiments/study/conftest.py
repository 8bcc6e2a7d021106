"""The study on tiny networks and little data, once for all tests."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stochbn.experiments.data.splits import Part, Split, load_split
from stochbn.experiments.evaluation import evaluate as evaluation
from stochbn.experiments.evaluation.diagnostics import choose_rows
from stochbn.experiments.files import File
from stochbn.experiments.study.draws import Sizes, Study, Task
from stochbn.experiments.study.measure import measure_study
from stochbn.experiments.study.results import Results
from stochbn.experiments.training import train as training
from stochbn.experiments.training.recipes import RECIPES, Experiment

PLAIN = replace(RECIPES["digits"], name="tiny", epochs=5, width=0.1)
DROPOUT = replace(PLAIN, name="tiny-dropout", dropout=0.2)
TINY = Experiment("tiny", PLAIN, 3, DROPOUT, 1)
SIZES = Sizes(num_samples=6, num_compared=2, num_other=60, num_corrupted=5, num_exact=15, num_resamples=20)


def load_little(data: str, part: Part, **options: Any) -> Split:
    split = load_split(data, part, **options)
    return split[choose_rows(split, {"train": 256, "validation": 80, "test": 80, "out-of-domain": 70}[part])]


def use_little(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("STOCHBN_DATA", str(folder / "cache"))
    for module in (training, evaluation):
        patch.setattr(module, "load_split", load_little)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the networks are trained and drawn from."""
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="session")
def trained(folder: Path) -> Study:
    """The study with all its draws."""
    console = Console(file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        use_little(patch, folder)
        for recipe, seed in TINY.runs():
            training.train(recipe, seed, console=console)
        study = Study(TINY, SIZES, console=console)
        study.draw()
    return study


@pytest.fixture
def study(trained: Study, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """The same, where a test looks into its cache."""
    use_little(monkeypatch, folder)
    return trained


@pytest.fixture(scope="session")
def files(trained: Study, folder: Path) -> dict[Task, File]:
    with pytest.MonkeyPatch.context() as patch:
        use_little(patch, folder)
        return trained.read()


@pytest.fixture(scope="session")
def results(trained: Study, files: dict[Task, File], folder: Path) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        use_little(patch, folder)
        return measure_study(trained, files)
