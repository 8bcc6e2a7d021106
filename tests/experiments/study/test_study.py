import io
from pathlib import Path

import pytest
from rich.console import Console

from stochbn.experiments.study.draws import Study
from stochbn.experiments.study.results import Results
from stochbn.experiments.study.study import run_study, write_study
from stochbn.experiments.training.checkpoints import CheckpointError
from stochbn.experiments.training.recipes import EXPERIMENTS


def test_files_of_a_study(results: Results, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=5000)
    assert write_study(results, tmp_path, console) == tmp_path / "study.md"
    assert (tmp_path / "study.md").read_text() in console.file.getvalue()
    assert Results.read(tmp_path / "study.json").methods.keys() == results.methods.keys()
    for name in ("methods", "corruptions", "tuning", "draws"):
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000


def test_a_whole_run(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what has been drawn to the files; the numbers are those of the other tests."""
    asked: dict[str, object] = {}

    def make(experiment: object, sizes: object, **options: object) -> Study:
        asked.update(options, sizes=sizes)
        return study

    monkeypatch.setattr("stochbn.experiments.study.study.Study", make)
    monkeypatch.setattr("stochbn.experiments.study.study.measure_study", lambda study, files: list(files))
    monkeypatch.setattr("stochbn.experiments.study.study.write_study", lambda found, folder, console: found)
    console = Console(file=io.StringIO())
    found = run_study(study.experiment, tmp_path, num_samples=9, compiles=True, console=console)
    assert found == study.tasks
    assert asked["sizes"].num_samples == 9
    assert (asked["compiles"], asked["data"], asked["console"]) == (True, None, console)


def test_untrained_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="Expected trained networks of lenet5, got none"):
        run_study(EXPERIMENTS["lenet5"], tmp_path, console=Console(file=io.StringIO()))
