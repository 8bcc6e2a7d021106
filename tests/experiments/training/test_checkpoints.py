import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from stochbn.experiments.training import checkpoints
from stochbn.experiments.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    is_locked,
    is_trained,
    locked,
    read_checkpoint,
    write_checkpoint,
)
from stochbn.experiments.training.recipes import RECIPES
from stochbn.experiments.training.train import train

TINY = replace(RECIPES["digits"], name="tiny", width=0.2, epochs=2, batch_size=40)
HOLD = """
import sys, time
from pathlib import Path
from stochbn.experiments.training.checkpoints import locked
with locked(Path(sys.argv[1]), "tiny seed 0"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path))


def corrupt(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    "damage",
    [corrupt, lambda content: content[:-100], lambda content: content[:5], lambda content: b"", lambda content: b"{}"],
    ids=["one bit", "truncated", "header truncated", "empty", "other"],
)
def test_damaged_checkpoint_is_refused(damage):
    path = train(TINY, seed=0)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"got a damaged or foreign file: .*seed0\.safetensors .* Delete it"):
        train(TINY, seed=0)


def test_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match="damaged or foreign"):
        read_checkpoint(tmp_path / "foreign.safetensors")


def test_checkpoint_round_trip_keeps_every_bit(tmp_path):
    weights = {"a": torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last), "n": torch.tensor(7)}
    checkpoint = Checkpoint(TINY, 2, [{"train_loss": 0.1}], weights, {"random_state": torch.get_rng_state()})
    write_checkpoint(tmp_path / "c.safetensors", checkpoint)
    again = read_checkpoint(tmp_path / "c.safetensors")
    assert (again.recipe, again.seed, again.history) == (TINY, 2, checkpoint.history)
    assert torch.equal(again.weights["a"], weights["a"])
    assert torch.equal(again.weights["n"], weights["n"])
    assert torch.equal(again.resume["random_state"], checkpoint.resume["random_state"])


def test_checkpoints_are_found_by_recipe_and_seed():
    assert find_checkpoint(TINY, 0) is None
    assert not is_trained(TINY, 0)
    record = {"train_loss": 0.1}
    for history, trained in (([record], False), ([record] * 2, True)):
        write_checkpoint(checkpoint_path(TINY, 0), Checkpoint(TINY, 0, history, {"a": torch.zeros(1)}, {}))
        assert find_checkpoint(TINY, 0).history == history
        assert is_trained(TINY, 0) == trained
    with pytest.raises(CheckpointError, match=r"of tiny as it is now, got width 0\.2 instead of 0\.3: .* Delete it"):
        is_trained(replace(TINY, width=0.3), 0)


def test_two_processes_never_train_the_same_network(monkeypatch):
    monkeypatch.setattr(checkpoints, "_PATIENCE", 0.1)
    path = checkpoint_path(TINY, 0)
    path.parent.mkdir(parents=True)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        assert is_locked(path)
        assert not is_locked(checkpoint_path(TINY, 1))
        sentence = (
            r"^Expected to be the only process at work on tiny seed 0, got another one that holds .*\.lock\. Wait"
        )
        with pytest.raises(CheckpointError, match=sentence):
            train(TINY, seed=0)
        assert not path.exists()
        train(TINY, seed=1)  # another network is free
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    lock = path.with_name("seed0.safetensors.lock")
    assert lock.exists()  # nobody was there to remove it
    assert not is_locked(path)
    assert not is_trained(TINY, 0)
    train(TINY, seed=0)
    assert sorted(file.name for file in path.parent.iterdir()) == ["seed0.safetensors", "seed1.safetensors"]


def test_a_lock_that_is_soon_free_is_waited_for(monkeypatch):
    path = checkpoint_path(TINY, 0)
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "_PATIENCE", 5.0)
    started = time.monotonic()
    with locked(path, "it") as _:
        held = checkpoints._lock(path.with_name("seed0.safetensors.lock"))
        assert held is None  # also within one process
    with locked(path, "it"):
        assert is_locked(path)
    assert time.monotonic() - started < 5
    assert not list(path.parent.iterdir())


def test_a_finished_network_needs_no_lock():
    path = train(TINY, seed=0)
    with locked(path, "tiny seed 0"):
        assert train(TINY, seed=0) == path
