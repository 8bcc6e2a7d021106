"""`assess` from files alone, and the three commands of README that end in a page."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stochbn
from stochbn.cli.main import main

README = Path(__file__).parents[2] / "README.md"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_the_three_commands_of_readme_end_in_a_page(own, capsys):
    """From files alone, as README has them, but for the names of the files and for `nets:build`."""
    (block,) = re.findall(r"^```sh\n(stochbn fit .*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    rng = np.random.default_rng(0)
    for name in ("train", "val", "test"):
        x = rng.normal(size=(96, 4)).astype(np.float32)
        with torch.no_grad():
            probs = own["model"](torch.from_numpy(x)).softmax(1).numpy()
        np.savez(f"{name}.npz", x=x, y=np.array([rng.choice(3, p=p / p.sum()) for p in probs]))
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines()]
    assert [words[:2] for words in commands] == [["stochbn", name] for name in ("fit", "tune", "assess")]
    for words in commands:
        given = [{"nets:build": "own_nets:build", "net.pt": "model.pt"}.get(word, word) for word in words[1:]]
        with pytest.raises(SystemExit) as ended:
            main([*given, *(["--risk", "0.9"] if given[0] == "assess" else [])])
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert "\nNext" in out
        assert given[0] != "tune" or "--validation VALIDATION --test TEST" in out
    assert "Next: open assessment/index.html" in out
    text = Path("assessment/index.html").read_text("utf-8")
    assert "Given statistics, tuned" in text
    assert json.loads(Path("assessment/assessment.json").read_text())["num_inputs"]["test"] == 96


@pytest.mark.usefixtures("own")
def test_names_from_files_are_escaped(run):
    Path("names.txt").write_text(f"{HOSTILE}\n{HOSTILE}2\n{HOSTILE}3\n")
    code, out, _ = run("assess", classes="names.txt", title=HOSTILE, samples=4, risk=0.9)
    assert code == 0
    assert "Wrote assessment/index.html, with assessment.json, abstain.json, chosen.sbn.safetensors beside it." in out
    assert "Validation data (--validation) would add" in out
    text = Path("assessment/index.html").read_text("utf-8")
    assert HOSTILE not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "own_nets:wide"}, "Expected a batch that Sequential can take"),
        ({"test": "strange.npz"}, "class indices in [0, 3)"),
        ({"test": "own_nets:tensor"}, "Expected labels in the test data"),
        ({"train": None}, "Expected training data to fit to, or statistics from stochbn.fit, got neither"),
        ({"batch_size": None}, "Expected --batch-size"),
        ({"out": "model.pt"}, "Expected a folder to write the page to, got the file model.pt"),
        ({"out": "model.pt/deep"}, "Expected a folder to write the page to"),
        ({"out": "not/yet/there", "risk": 2}, "Expected a risk between 0 and 1"),
        ({"classes": "nowhere.txt"}, "Expected a file with the name of a class in each line, got no file nowhere.txt"),
        ({"classes": "names.txt"}, "Expected a name for each of 3 classes, got 1 names"),
        ({"test": "data.npz"}, "Expected train and test data that share no input, got the same for both"),
        ({"validation": "./test.npz"}, "Expected validation and test data that share no input"),
        ({"risk": 2}, "Expected a risk between 0 and 1, got 2.0"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(refused, own, options, message):
    Path("names.txt").write_text("one\n")
    np.savez("strange.npz", x=own["x"].numpy(), y=np.full(len(own["x"]), 7))
    before = sorted(Path().rglob("*"))
    assert message in refused("assess", **options)
    assert [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]


def test_classes_are_named_by_the_data(run, own, monkeypatch):
    seen = {}

    def look(*_, **options):
        seen.update(options)
        raise ValueError("seen")

    monkeypatch.setattr(stochbn, "assess", look)
    y = np.zeros(len(own["x"]), np.int64)
    np.savez("test.npz", x=own["x"].numpy(), y=y, classes=np.array(["cat", "dog", "owl"]))
    assert run("assess")[2] == "Error: seen\n"
    assert list(seen["class_names"]) == ["cat", "dog", "owl"]


def test_without_the_extra_it_says_what_to_install(refused, own, monkeypatch):
    monkeypatch.delitem(sys.modules, "stochbn.assessment.page", raising=False)
    monkeypatch.delitem(sys.modules, "stochbn.pages.page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "Install with pip install 'stochbn[plots]'." in refused("assess")


def test_progress_is_for_terminals(run, own, monkeypatch):
    def look(*_, **options):
        assert options["progress"] is False
        raise ValueError("seen")

    monkeypatch.setattr(stochbn, "assess", look)
    assert run("assess")[2] == "Error: seen\n"
