from pathlib import Path

import pytest

from stochbn.experiments.data.splits import Split, load_split
from stochbn.experiments.report import report
from stochbn.experiments.training.recipes import EXPERIMENTS
from tiny import TINY, measure_little, run


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the tiny experiment once, from training to the page, by the real command."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCHBN_DATA", str(folder / "cache"))
        patch.setitem(EXPERIMENTS, "tiny", TINY)
        measure_little(patch)
        patch.setattr(
            report, "render", lambda figure: {"png": b"", "svg": b"<svg/>"}
        )  # a test of the report draws them
        assert run("reproduce", "tiny", "--out", str(folder), "--samples", "6", "--threads", "1") == 0
    return folder


@pytest.fixture(scope="session")
def loaded() -> dict[str, Split]:
    return {part: load_split("digits", part) for part in ("train", "validation", "test", "out-of-domain")}


@pytest.fixture
def splits(loaded: dict[str, Split]) -> dict[str, Split]:
    """A dictionary of its own for each test, as some change theirs."""
    return dict(loaded)


@pytest.fixture
def _cache(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(results / "cache"))
    measure_little(monkeypatch)
