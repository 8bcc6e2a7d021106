"""The soak runs, and whatever goes wrong in it is counted."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import jobs, soak
from benchmarks.jobs import JOBS, Fault, Scene, Tally

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that interrupt")
def test_a_few_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.02", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing was left over." in done.stdout
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["command"] == "python -m benchmarks.soak --minutes 0.02 --seed 0"
    assert {"commit", "date", "versions", "machine", "seed", "minutes"} <= results.keys()
    assert results["left"] == []
    assert list(results["jobs"]) == [*JOBS, "interrupted"]
    assert all(tally["calls"] > 0 and tally["wrong"] == 0 for tally in results["jobs"].values())
    assert all(results["memory_bytes"][when] > 2**20 for when in ("start", "middle", "end"))


def give(value: float) -> Callable[[], Tensor]:
    return lambda: torch.tensor([value])


def fail(error: BaseException) -> Tensor:
    raise error


def turn_gradients_off() -> Tensor:
    torch.set_grad_enabled(False)
    return torch.ones(1)


@pytest.mark.parametrize(
    ("work", "raised", "rounded", "problem"),
    [
        (give(1.0), 0, 0, None),
        (give(1 + 1e-6), 0, 1, None),
        (give(1.1), 0, 1, "another answer, off by 0.1"),
        (lambda: fail(Fault()), 1, 0, None),
        (lambda: fail(RuntimeError("on its own")), 0, 0, "RuntimeError: on its own"),
        (turn_gradients_off, 0, 0, "gradients were left off"),
    ],
)
def test_every_call_is_judged(work: Callable[[], Tensor], raised: int, rounded: int, problem: str | None) -> None:
    tally = Tally()
    tally.attempt(work, torch.ones(1), Fault)
    assert (tally.calls, tally.raised, tally.rounded, tally.wrong) == (1, raised, rounded, int(problem is not None))
    assert tally.problems == ([problem] if problem else [])
    assert torch.is_grad_enabled()


def test_problems_are_counted_and_the_first_kept() -> None:
    tally = Tally()
    for number in range(9):
        tally.note(str(number))
    assert (tally.wrong, tally.problems) == (9, list("01234"))


@pytest.mark.parametrize("name", ["fail_in_forward", "fail_in_loader", "fail_in_file", "make_and_drop"])
@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")
def test_each_job_gives_what_it_should(name: str, tmp_path: Path) -> None:
    tally, chance = Tally(), random.Random(0)
    scene = Scene(0, tmp_path)
    for pair in scene.pairs:
        getattr(jobs, name)(scene, tally, chance, *pair)
    assert (tally.problems, tally.calls >= len(scene.pairs)) == ([], True)
    assert (tally.raised > 0) == name.startswith("fail")


def spoil(scene: Scene, tally: Tally, chance: random.Random, m: int, i: int) -> None:
    """Leaves everything behind that can be left."""
    scene.models[0].train()
    scene.models[1][1].running_mean.add_(1)
    torch.rand(1)
    (Path(tempfile.gettempdir()) / "left.tmp").write_text("")
    spoil.held = scene.copy(m)  # type: ignore[attr-defined]
    threading.Thread(target=time.sleep, args=(1,), name="sleeper", daemon=True).start()
    tally.attempt(lambda: scene.predict(scene.models[2], m, i) + 1, scene.predicted[m, i])


def test_whatever_is_left_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "JOBS", {"spoil": (spoil,)})
    monkeypatch.setattr(soak, "be_interrupted", lambda *_: time.sleep(0.05))
    monkeypatch.setattr(soak, "PATIENCE", 0.2)
    monkeypatch.setattr(soak, "GROWTH", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = soak.soak(0.003, 0, tmp_path)
    assert found["jobs"]["spoil"]["wrong"] == found["jobs"]["spoil"]["calls"] > 0
    left = "\n".join(found["left"])
    for problem in (
        "thread 'sleeper' still runs",
        "model 0 was changed: training",
        "model 1 was changed: 1.running_mean",
        "torch's random state was changed",
        "file left.tmp was left over",
        "1 dropped models are still held",
        "memory grew from",
    ):
        assert problem in left
    del spoil.held  # type: ignore[attr-defined]


def test_minutes_must_be_some(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "0"])
    assert "Expected --minutes above 0, got 0. Pass 10, say." in capsys.readouterr().err
