import copy
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import torch
from rich.console import Console
from torch.nn import functional as F

from stochbn.experiments.data.splits import load_split, to_inputs
from stochbn.experiments.training import train as train_module
from stochbn.experiments.training.checkpoints import (
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    load_network,
    read_checkpoint,
    write_checkpoint,
)
from stochbn.experiments.training.recipes import RECIPES
from stochbn.experiments.training.train import augment, ghost_batches, learning_rate, train, validate

TINY = replace(RECIPES["digits"], name="tiny", width=0.2, epochs=3, batch_size=40)
# All that draws random numbers: dropout, augmentation, order of the data.
NOISY = replace(TINY, name="noisy", dropout=0.5, augment=True, optimizer="sgd", learning_rate=0.05)


@pytest.fixture(autouse=True)
def _cache_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small steps on several threads crawl when other processes keep the cores busy
    yield
    torch.set_num_threads(num_threads)


def assert_same_weights(left, right):
    left, right = read_checkpoint(left).weights, read_checkpoint(right).weights
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def interrupt_after_first_epoch(monkeypatch, recipe):
    """Trains one epoch and stops right after its checkpoint, as an interruption from outside would."""

    def write_and_stop(path, checkpoint):
        write_checkpoint(path, checkpoint)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "write_checkpoint", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, seed=0)


@pytest.mark.parametrize("recipe", [TINY, NOISY], ids=["adam", "sgd"])
def test_seed_determines_weights(recipe, tmp_path, monkeypatch):
    first = train(recipe, seed=0)
    other_seed = train(recipe, seed=1)
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "again"))
    torch.manual_seed(123)
    assert_same_weights(first, train(recipe, seed=0))
    with pytest.raises(AssertionError):
        assert_same_weights(first, other_seed)


def test_random_state_outside_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_network(train(TINY, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recipe", [TINY, NOISY], ids=["adam", "sgd"])
def test_interrupted_run_resumes_to_the_same_bits(recipe, tmp_path, monkeypatch):
    uninterrupted = train(recipe, seed=0)
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "again"))
    interrupt_after_first_epoch(monkeypatch, recipe)
    assert len(read_checkpoint(checkpoint_path(recipe, 0)).history) == 1
    resumed = train(recipe, seed=0)
    assert_same_weights(uninterrupted, resumed)
    without_time = [
        [{**record, "seconds": 0} for record in read_checkpoint(path).history] for path in (uninterrupted, resumed)
    ]
    assert without_time[0] == without_time[1]


KILLS = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch._dynamo  # an optimizer imports it
from stochbn.experiments.training.checkpoints import read_checkpoint
from stochbn.experiments.training import train  # once for all children: this takes longer than to train
from stochbn.cli import main as cli

def die_at(name, number):
    original, calls = getattr(os, name), itertools.count(1)
    def call(*arguments, **options):
        if next(calls) < number:
            return original(*arguments, **options)
        if name == "fdopen":
            os.write(arguments[0], b"half a checkpoint")
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, call)

path = Path(sys.argv[1])
for moment in sys.argv[2:]:
    name, number = moment.split()
    pid = os.fork()
    if not pid:
        if name != "sleep":
            die_at(name, int(number))
        cli.main(["train", "digits", "--epochs", "6", "--batch-size", "40"])
    if name == "sleep":
        time.sleep(float(number))
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGKILL or (name == "sleep" and not code), moment  # or it was fast
    print("after", moment, len(read_checkpoint(path).history) if path.exists() else 0, flush=True)
"""


def test_killed_at_many_moments_it_resumes_to_the_same_bits(tmp_path, monkeypatch):
    recipe = RECIPES["digits"].vary(epochs=6, batch_size=40)
    uninterrupted = train(recipe, seed=0)
    seconds = read_checkpoint(uninterrupted).history[-1]["seconds"]  # of an epoch

    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "killed"))
    path = checkpoint_path(recipe, 0)
    # While the first checkpoint is written, while the second is to take its place, and at random.
    moments = ["fdopen 1", "replace 1", "replace 2", "fdopen 1", "fsync 1", "replace 1"]
    moments += [f"sleep {share * seconds:.3f}" for share in np.random.default_rng(0).uniform(0, 3, 3)]
    command = [sys.executable, "-c", KILLS, str(path), *moments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found = re.findall(r"^after (.*) (\d)$", done.stdout, re.MULTILINE)
    epochs = [int(number) for _, number in found]
    assert [moment for moment, _ in found] == moments
    assert epochs[:6] == [0, 0, 1, 1, 1, 1]
    assert epochs == sorted(epochs)  # what is done stays done
    lock = path.with_name(f"{path.name}.lock")  # which the operating system has released
    left = [file for file in path.parent.iterdir() if file not in (path, lock)]
    assert len(left) <= 1  # each write removes what the one before it left
    assert lock.exists()

    assert_same_weights(uninterrupted, train(recipe, seed=0))
    assert list(path.parent.iterdir()) == [path]


def test_training_learns_and_keeps_its_history():
    recipe = replace(RECIPES["digits"], epochs=3)
    checkpoint = read_checkpoint(train(recipe, seed=0))
    assert [set(record) for record in checkpoint.history] == [
        {"train_loss", "validation_nll", "validation_error", "seconds"}
    ] * 3
    assert checkpoint.history[-1]["train_loss"] < checkpoint.history[0]["train_loss"]
    assert checkpoint.history[-1]["validation_error"] < 0.05
    network = load_network(checkpoint_path(recipe, 0))
    assert not network.training
    nll, error = validate(network, load_split("digits", "validation"))
    assert nll == pytest.approx(checkpoint.history[-1]["validation_nll"], rel=1e-4)
    assert error == checkpoint.history[-1]["validation_error"]


def test_finished_run_is_left_alone_and_holds_weights_only(monkeypatch):
    path = train(TINY, seed=0)
    content = path.read_bytes()
    monkeypatch.setattr(train_module, "load_split", lambda *_, **__: pytest.fail("trained again"))
    assert train(TINY, seed=0) == path
    assert path.read_bytes() == content
    assert read_checkpoint(path).resume == {}
    assert [file.name for file in path.parent.iterdir()] == ["seed0.safetensors"]


def test_header_is_json_and_names_recipe_and_seed():
    with safetensors.safe_open(train(TINY, seed=4), "pt") as file:
        header = json.loads(file.metadata()["checkpoint"])
    assert header["format"] == "stochbn-checkpoint-1"
    assert (header["recipe"]["name"], header["seed"], header["epoch"]) == ("tiny", 4, 3)
    assert (header["torch"], header["num_threads"]) == (torch.__version__, 1)


def test_checkpoint_of_another_recipe_is_refused():
    path = train(TINY, seed=0)
    with pytest.raises(
        CheckpointError, match=r"of tiny as it is now, got batch_size 40 instead of 20: .*seed0.* Delete it"
    ):
        train(replace(TINY, batch_size=20), seed=0)
    path.rename(checkpoint_path(TINY, 1))
    with pytest.raises(CheckpointError, match="got seed 0 instead of 1"):
        train(TINY, seed=1)


def test_failed_write_keeps_the_old_checkpoint(monkeypatch):
    interrupt_after_first_epoch(monkeypatch, TINY)
    path = checkpoint_path(TINY, 0)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            train(TINY, seed=0)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["seed0.safetensors"]
    assert len(read_checkpoint(train(TINY, seed=0)).history) == 3  # with room on the disk again


def test_missing_and_unfinished_checkpoints_are_explained(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"got none\. Train the network first"):
        load_network(tmp_path / "nowhere.safetensors")
    interrupt_after_first_epoch(monkeypatch, TINY)
    with pytest.raises(CheckpointError, match="got one at epoch 1 of 3"):
        load_network(checkpoint_path(TINY, 0))


def test_recipe_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="at least one epoch of one batch, got 3 epochs of 0"):
        train(replace(TINY, batch_size=5000), seed=0)


def test_ghost_batches_are_four_batches_of_16_to_the_layers():
    network = replace(RECIPES["vgg11"], width=0.05).build_network().double().train()
    together, apart = copy.deepcopy(network), network
    inputs, labels = torch.rand(64, 3, 32, 32, dtype=torch.float64), torch.randint(5, (64,))
    with ghost_batches(16):
        outputs = together(inputs)
        F.cross_entropy(outputs, labels, reduction="sum").backward()
    parts = [apart(part) for part in inputs.split(16)]
    for part, label in zip(parts, labels.split(16), strict=True):
        F.cross_entropy(part, label, reduction="sum").backward()

    torch.testing.assert_close(outputs, torch.cat(parts))
    assert not torch.allclose(outputs, copy.deepcopy(apart)(inputs), atol=1e-3)  # as one batch it would be another
    buffers = dict(apart.named_buffers())
    for name, buffer in together.named_buffers():
        if not name.endswith("num_batches_tracked"):  # which counts forward passes, and is used by no layer of ours
            torch.testing.assert_close(buffer, buffers[name], msg=lambda text, name=name: f"{name}: {text}")
    for (name, one), (_, other) in zip(together.named_parameters(), apart.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_ghost_batches_leave_evaluation_alone():
    network = TINY.build_network().eval()
    inputs = torch.rand(8, 1, 28, 28)
    expected = network(inputs)
    with ghost_batches(4):
        assert torch.equal(network(inputs), expected)


def test_images_are_shrunk_as_the_recipe_has_it(monkeypatch):
    seen = []
    monkeypatch.setattr(train_module, "resize", lambda inputs, size: seen.append(size) or inputs)
    train(replace(TINY, epochs=2, image_sizes=(14, 28)), seed=0)
    assert seen == [14] * 30 + [28] * 30


def test_mixed_precision_trains_the_same_network_less_exactly(monkeypatch):
    whole = load_network(train(TINY, seed=0)).state_dict()
    seen = []
    softmax = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda x, *given, **options: seen.append(x) or softmax(x, *given, **options)
    )
    recipe = replace(TINY, name="mixed", mixed_precision=True)
    mixed = load_network(train(recipe, seed=0)).state_dict()
    assert {value.dtype for value in mixed.values()} == {value.dtype for value in whole.values()}
    # In training, logits have bfloat16's eight bits, and the loss those of float32; validation is exact.
    assert all(x.dtype == torch.float32 and (x.requires_grad == torch.equal(x, x.bfloat16().float())) for x in seen)
    assert {x.requires_grad for x in seen} == {True, False}
    histories = [find_checkpoint(one, 0).history for one in (TINY, recipe)]
    losses = [[record["train_loss"] for record in history] for history in histories]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_learning_rates_begin_peak_and_end_where_they_should():
    adam, sgd = RECIPES["lenet5"], replace(RECIPES["lenet5"], optimizer="sgd", learning_rate=0.1)
    assert [learning_rate(adam, at) for at in (0, 0.5, 1)] == pytest.approx([1e-3, 5e-4, 0])
    assert [learning_rate(sgd, at) for at in (0, 0.15, 0.3, 0.65, 1)] == pytest.approx([0.004, 0.052, 0.1, 0.05, 0])


def test_augment_is_a_reflect_padded_crop_and_a_flip():
    images = torch.randint(0, 256, (64, 3, 9, 11), dtype=torch.uint8)
    torch.manual_seed(0)
    result = augment(images)
    torch.manual_seed(0)
    downs, rights = torch.randint(-4, 5, (64, 1)) + 4, torch.randint(-4, 5, (64, 1)) + 4
    flips = torch.rand(64, 1) < 0.5
    padded = F.pad(images.float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
    for image, crop, down, right, flip in zip(padded, result, downs, rights, flips, strict=True):
        expected = image[:, down : down + 9, right : right + 11]
        assert torch.equal(crop, expected.flip(2) if flip else expected)
    assert 10 < int(flips.sum()) < 54


def test_validate_is_the_mean_over_all_images():
    split = load_split("digits", "validation")
    network = TINY.build_network()
    nll, error = validate(network, split, batch_size=64)
    logits = network(to_inputs(split.images))
    assert nll == pytest.approx(F.cross_entropy(logits, split.labels).item(), rel=1e-4)
    assert error == pytest.approx((logits.argmax(1) != split.labels).float().mean().item())


def test_log_has_one_line_an_epoch_and_a_terminal_a_live_bar():
    log, terminal = io.StringIO(), io.StringIO()
    train(TINY, seed=0, console=Console(file=log))
    lines = log.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  train loss ")
    assert "validation NLL" in lines[0]
    train(TINY, seed=1, console=Console(file=terminal, force_terminal=True, width=140))
    assert "accuracy" in terminal.getvalue()
    assert "epoch 1/3" not in terminal.getvalue()


def test_bar_shows_the_time_left_in_80_columns():
    terminal = io.StringIO()
    recipe = replace(TINY, name="lenet5-dropout-10epochs", epochs=1)
    train(recipe, seed=10, console=Console(file=terminal, force_terminal=True, width=80, color_system=None))
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.getvalue()))
    lines = [line for line in shown if line.strip()]
    assert all(len(line) <= 80 for line in lines)
    assert all(re.search(r"loss \S+  accuracy \S+ +[-\d]:[-\d]{2}:[-\d]{2} *$", line) for line in lines), lines
    assert "100% loss" in lines[-1]
