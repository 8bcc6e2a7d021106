"""Exit codes, one-line errors, warnings and Ctrl-C, in this process and in real ones."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stochbn.cli.main import main
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.training.checkpoints import CheckpointError, read_checkpoint

BARE = """
import sys

class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in "PIL jinja2 matplotlib pooch scipy sklearn".split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from stochbn.cli.main import main

try:
    main(["predict", "own_nets:build", "--checkpoint=model.pt", "--data=data.npz", "--out=pred.csv"])
except SystemExit as ended:
    print("Ended with", ended.code)
main(["train", "digits"])
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory, write_own):
    """Two real processes, which start together as most of their time is spent on imports; and their cache."""
    folder = tmp_path_factory.mktemp("processes")
    write_own(folder)
    commands = {
        "bare": ["-c", BARE],
        "training": ["-m", "stochbn", "train", "digits", "--epochs", "500", "--threads", "1"],
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STOCHBN_DATA": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
            # A run in the background ignores Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for name, command in commands.items()
    }
    yield {**started, "cache": folder / "cache"}
    for process in started.values():
        process.kill()
        process.communicate()


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


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
    monkeypatch.setattr("stochbn.experiments.training.train.train", fail_with(error))
    hook = sys.excepthook  # which prints the traceback
    assert refused("train", "digits").startswith(line)
    for arguments in (["--debug", "train", "digits"], ["train", "digits", "--debug"]):
        with pytest.raises(type(error)):
            main(arguments)
    assert sys.excepthook is hook


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_no_arguments_ask_for_help(run, debug):
    assert run(*debug) == run("--help")


def test_ctrl_c_has_its_own_code(run, monkeypatch):
    monkeypatch.setattr("stochbn.experiments.training.train.train", fail_with(KeyboardInterrupt))
    monkeypatch.setattr("stochbn.play.panel.train", fail_with(KeyboardInterrupt))
    for words in (["train", "digits"], ["play", "--port=0"]):
        code, _, err = run(*words)
        assert (code, err) == (130, "Interrupted; run the same command to resume.\n")
    for place in (
        "stochbn.cli.models.load_model",
        "stochbn.cli.models.load_models",
        "stochbn.cli.models.load_stats",
        "stochbn.cli.predict.load_models",
        "stochbn.experiments.data.splits.list_data",
        "stochbn.experiments.report.report.write_report",
    ):
        monkeypatch.setattr(place, fail_with(KeyboardInterrupt))
    for words in (
        ["fit"],
        ["tune"],
        ["predict"],
        ["export"],
        ["data"],
        ["report", "results"],
    ):  # nothing is kept to resume from
        code, _, err = run(*words)
        assert (code, err) == (130, "Interrupted.\n")


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("own")
def test_warnings_are_one_line(run):
    code, _, err = run("predict", data="own_nets:shuffled")
    assert code == 0
    assert err == "Warning: The DataLoader shuffles: rows follow its order, not that of the data.\n"


@pytest.mark.parametrize("package", ["typer", "rich.console", "numpy"])
def test_without_the_extra_it_says_what_to_install(refused, monkeypatch, package):
    for module in [name for name in sys.modules if name.startswith("stochbn.cli.") and name != main.__module__]:
        monkeypatch.delattr(module)
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    assert refused("demo").endswith("Install with pip install 'stochbn[cli]'.\n")


def test_a_real_process_interrupted_can_be_resumed(processes):
    process, checkpoint = processes["training"], processes["cache"] / "checkpoints/digits-500epochs/seed0.safetensors"
    deadline = time.monotonic() + 300
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == "Interrupted; run the same command to resume.\n"
    assert "seed 0" in out
    assert read_checkpoint(checkpoint).resume


def test_own_models_do_without_what_the_experiments_need(processes):
    out, err = processes["bare"].communicate(timeout=300)
    assert "64 inputs, 1 draws" in out
    assert out.endswith("Ended with 0\n")
    assert processes["bare"].returncode == 2
    assert err == "Error: No module named 'pooch'. Install with pip install 'stochbn[experiments]'.\n"
