"""Whole queues on a tiny embedded set: what is made, by how many processes, and whatever may end them."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stochbn.experiments.evaluation import queue
from stochbn.experiments.evaluation.plan import plan
from stochbn.experiments.evaluation.queue import QueueError, reproduce
from stochbn.experiments.files import File, diagnostics_path, prediction_path
from stochbn.experiments.training import checkpoints
from stochbn.experiments.training.checkpoints import (
    checkpoint_path,
    find_checkpoint,
    is_locked,
    locked,
    read_checkpoint,
)
from stochbn.experiments.training.recipes import RECIPES, Experiment, Recipe
from stochbn.experiments.training.train import train
from tiny import DROPOUT, PLAIN, TINY, measure_little

SCRIPT = """
import signal, sys
from pathlib import Path
from stochbn.experiments.evaluation.queue import reproduce
from stochbn.experiments.training.recipes import Experiment, RECIPES
from dataclasses import replace
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell has not
    long = replace(RECIPES["digits"], name="long", epochs=12, width=0.1)
    reproduce(Experiment("long", long, 2), Path(sys.argv[1]), jobs=2, num_samples=4)
"""
LONG = replace(RECIPES["digits"], name="long", epochs=12, width=0.1)  # leaves time to end it in the middle


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(queue, "LOOKS", 0.2)
    measure_little(monkeypatch)


def run(experiment: Experiment, folder: Path, *, jobs: int) -> str:
    console = Console(file=io.StringIO(), width=200)
    reproduce(experiment, folder, jobs=jobs, num_samples=4, console=console)
    return console.file.getvalue()


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = read_checkpoint(one).weights, read_checkpoint(other).weights
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_two_jobs_make_all_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run(TINY, tmp_path, jobs=2)
    assert "0 of 3 networks done, 0 running, 3 left; how long is known after an epoch." in said
    lines = said.splitlines()
    for name in ("tiny seed 0", "tiny seed 1", "tiny-dropout seed 0"):
        assert [line.split("  ")[0] for line in lines if line.startswith(f"{name}: epoch")] == [
            *(f"{name}: epoch 1/2", f"{name}: epoch 2/2"),
        ]
    assert any(line.endswith("3 of 3 networks done, 0 running, 0 left.") for line in lines)
    assert [run.state for run in plan(TINY, tmp_path, num_samples=4)] == ["done"] * 3
    assert File.read(diagnostics_path(tmp_path)).header["gallery"]["method"] == "Deep Ensembles (2) + SBN"
    made = {path: path.read_bytes() for path in (tmp_path / "predictions").iterdir()}

    with monkeypatch.context() as patch:  # nothing is left to do
        for name in ("_start", "train", "evaluate_network"):
            patch.setattr(queue, name, lambda *_, **__: pytest.fail("made again"))
        assert "3 of 3 networks done" in run(TINY, tmp_path, jobs=2)
    assert {path: path.read_bytes() for path in (tmp_path / "predictions").iterdir()} == made

    # One job, in this process, makes the same networks and predictions.
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "other"))
    only = Experiment("tiny", PLAIN, 1)
    run(only, tmp_path / "one", jobs=1)
    assert_same_weights(tmp_path / "cache/checkpoints/tiny/seed0.safetensors", checkpoint_path(PLAIN, 0))
    one, other = (File.read(prediction_path(folder, "tiny", 0)) for folder in (tmp_path / "one", tmp_path))
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def start(folder: Path) -> subprocess.Popen[str]:
    """Starts a queue in a process of its own and returns when a network has a checkpoint."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(checkpoint_path(LONG, seed).exists() for seed in (0, 1)) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    return process


def wait_for(condition: object, seconds: float = 120.0) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


def count_epochs(recipe: Recipe) -> list[int]:
    found = [find_checkpoint(recipe, seed) for seed in (0, 1)]
    return [len(checkpoint.history) if checkpoint else 0 for checkpoint in found]


def test_killed_in_the_middle_of_an_epoch_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(tmp_path)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(is_locked(checkpoint_path(LONG, seed)) for seed in (0, 1)))  # workers end with it
    epochs = count_epochs(LONG)
    further = epochs.index(max(epochs))
    assert 0 < epochs[further] < 12
    for name in ("evaluate_network", "diagnose"):  # which a full disk interrupts below
        monkeypatch.setattr(queue, name, lambda *_, **__: None)
    said = run(Experiment("long", LONG, 2), tmp_path, jobs=1)
    assert "0 of 2 networks done, 0 running, 2 left; about" in said
    assert said.count(f"epoch {max(epochs)}/12") == sum(count < max(epochs) for count in epochs)  # none is done twice
    made = checkpoint_path(LONG, further)
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "uninterrupted"))
    assert_same_weights(made, train(LONG, further, console=Console(file=io.StringIO())))


def test_ctrl_c_ends_the_workers_too(tmp_path: Path) -> None:
    process = start(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert errors.count("Traceback") == 1  # that of the script itself, which the command would turn into a line
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not any(is_locked(checkpoint_path(LONG, seed)) for seed in (0, 1))
    assert 0 < max(count_epochs(LONG)) < 12


def test_a_network_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    folder = checkpoint_path(DROPOUT, 0).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    sentence = (
        r"^Expected to make all networks, got 1 failures \(tiny-dropout seed 0: Expected to write to the cache .*"
    )
    with pytest.raises(QueueError, match=sentence + r"Start it again\.$"):
        run(replace(TINY, num_seeds=1), tmp_path, jobs=2)
    assert [one.state for one in plan(replace(TINY, num_seeds=1), tmp_path, num_samples=4)] == ["done", "left"]


def test_a_full_disk_loses_nothing_that_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment("tiny", PLAIN, 1)
    replace_file, written = os.replace, []

    def fill_up(source: object, target: object) -> None:
        if len(written) == room:
            raise OSError(28, "No space left on device")
        written.append(target)
        replace_file(source, target)

    room = 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fill_up)
        with pytest.raises(OSError, match=r"Expected to write to the cache .*: No space left on device\. Set STOCHBN"):
            run(experiment, tmp_path, jobs=1)
        assert len(find_checkpoint(PLAIN, 0).history) == 1
        room = 3  # the last epoch and the first method
        with pytest.raises(OSError, match="No space left on device"):
            run(experiment, tmp_path, jobs=1)
    assert find_checkpoint(PLAIN, 0).finished
    assert list(File.read(prediction_path(tmp_path, "tiny", 0)).header["methods"]) == ["plain"]
    run(experiment, tmp_path, jobs=1)
    assert plan(experiment, tmp_path, num_samples=4)[0].state == "done"


def test_a_network_that_another_process_trains_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock keeps out whoever did not take it, also in one process; test_checkpoints.py takes one in another."""
    experiment = Experiment("tiny", PLAIN, 2)
    path = checkpoint_path(experiment.recipe, 0)
    path.parent.mkdir(parents=True)
    with ExitStack() as other:
        other.enter_context(locked(path, "it"))
        assert [one.state for one in plan(experiment, tmp_path)] == ["running", "left"]
        looks = 0

        def look(checkpoint: Path) -> bool:
            nonlocal looks
            looks += 1
            if looks == 6:  # by then the other network is made
                assert prediction_path(tmp_path, "tiny", 1).exists()
                other.close()
            return checkpoints.is_locked(checkpoint)

        monkeypatch.setattr(queue, "is_locked", look)
        run(experiment, tmp_path, jobs=1)
    assert looks >= 6
    assert [one.state for one in plan(experiment, tmp_path, num_samples=4)] == ["done"] * 2


def test_one_lock_covers_training_and_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = checkpoint_path(PLAIN, 0).with_name("seed0.safetensors.lock")
    held: list[int] = []
    for name in ("train", "evaluate_network"):
        original = getattr(queue, name)
        note = lambda *a, original=original, **o: (held.append(lock.stat().st_ino), original(*a, **o))[1]  # noqa: E731
        monkeypatch.setattr(queue, name, note)
    run(Experiment("tiny", PLAIN, 1), tmp_path, jobs=1)
    assert len(held) == 2
    assert held[0] == held[1]
    assert not lock.exists()


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs_at_all(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 1 job, got {jobs}\. Pass the number of cores"):
        reproduce(TINY, tmp_path, jobs=jobs)
