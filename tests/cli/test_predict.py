"""`predict` on a user's files gives the library's numbers, by as many draws as asked for, under names people know."""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stochbn

pytestmark = pytest.mark.usefixtures("own")


def read_csv(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("wrong", [3, -1, 0.5])
def test_predict_writes_nothing_if_labels_are_no_classes(refused, own, wrong):
    labels = np.zeros(64) + (0.5 if wrong == 0.5 else 0)
    labels[5] = wrong
    np.savez("wrong.npz", x=own["x"].numpy(), y=labels if wrong == 0.5 else labels.astype(np.int64))
    Path("pred.csv").write_text("old")
    assert "Expected targets that are class indices in [0, 3), got" in refused("predict", data="wrong.npz")
    assert Path("pred.csv").read_text() == "old"


def test_predict_does_not_depend_on_the_batch_size(run):
    run("fit")
    for size in (1, 64):
        assert run("predict", stats="net.sbn.safetensors", samples=3, batch_size=size, out=f"{size}.csv")[0] == 0
    torch.testing.assert_close(read_csv("1.csv")["probs_0"], read_csv("64.csv")["probs_0"])


def test_predict_without_statistics_is_the_network_itself(run, own):
    code, out, _ = run("predict")
    assert code == 0
    assert "without SBN" in out
    with torch.no_grad():
        probs = own["model"](own["x"]).softmax(1)
    torch.testing.assert_close(read_csv("pred.csv")["confidence"], probs.max(1).values)


def test_predict_with_dropout(run, own):
    run("fit", dropout=True)
    assert run("predict", stats="net.sbn.safetensors", samples=4, dropout=True)[0] == 0
    stats = stochbn.load("net.sbn.safetensors")
    prediction = stochbn.predict(own["model"], stats, own["x"], num_samples=4, dropout=True)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], prediction.entropy)


def test_predict_writes_arrays(run, own):
    run("fit")
    assert run("predict", stats="net.sbn.safetensors", samples=4, out="deep/pred.npz")[0] == 0
    prediction = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=4)
    with np.load("deep/pred.npz") as arrays:
        assert set(arrays) == {"predicted", "confidence", "entropy", "aleatoric", "epistemic", "probs", "label"}
        np.testing.assert_allclose(arrays["probs"], prediction.probs.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("link", "columns"),
    [("sigmoid", ["entropy", "aleatoric", "epistemic", "probs"]), ("identity", ["mean", "std"])],
)
def test_other_links_have_columns_of_their_own(run, own, link, columns):
    run("fit")
    code, out, _ = run("predict", stats="net.sbn.safetensors", samples=4, link=link)
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
    assert "Expected --out to end in .npz for predicted of shape (64, 2, 2)" in refused("predict", **options)
    assert run("predict", **options, out="pred.npz")[0] == 0
    with np.load("pred.npz") as arrays:
        assert arrays["entropy"].shape == (64, 2, 2)


def test_as_many_draws_as_each_input_needs(run, own):
    run("fit")
    code, out, err = run("predict", stats="net.sbn.safetensors", samples="auto", tolerance=0.02)
    assert (code, err) == (0, "")
    stats = stochbn.load("net.sbn.safetensors")
    expected = stochbn.predict(own["model"], stats, own["x"], num_samples="auto", tolerance=0.02, keep_samples=False)
    written = read_csv("pred.csv")
    assert torch.equal(written["draws"].long(), expected.counts)
    assert len(expected.counts.unique()) > 1
    torch.testing.assert_close(written["entropy"], expected.entropy)
    assert f"64 inputs, {expected.counts.double().mean():.0f} draws on average: mean entropy" in out


@pytest.mark.skipif(not shutil.which("g++"), reason="compiling needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, within the compiler
def test_compiled_predictions_are_the_same(run, own):
    run("fit")
    assert run("predict", stats="net.sbn.safetensors", samples=4, compile=True, batch_size=64)[0] == 0
    expected = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=4)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], expected.entropy, rtol=1e-4, atol=1e-5)


def test_the_option_to_compile_reaches_the_library(run, monkeypatch):
    given = {}

    def predict(*_, **options):
        given.update(options)
        raise ValueError("far enough")

    monkeypatch.setattr(stochbn, "predict", predict)
    run("predict", compile=True)
    assert given["compile"] is True


NAMED = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from own_nets import x

class Folder(Dataset):  # as torchvision's
    classes = ["cat", "dog, small", "<b>owl</b>"]
    samples = [(f"pictures/{n}.png", 0) for n in range(64)]
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return x[index], int(x[index, 0] > 0)

class Third(Folder):
    def __getitem__(self, index):
        return *super().__getitem__(index), f"third {index}"

class Partly(IterableDataset):
    def __iter__(self):
        yield x[:32], torch.zeros(32).long(), [f"{n}.png" for n in range(32)]
        yield x[32:], torch.zeros(32).long()

partly = DataLoader(Partly(), batch_size=None)
folder, third, some = Folder(), Third(), Subset(Folder(), [5, 3])
shuffled = DataLoader(Folder(), 16, shuffle=True)
"""


@pytest.fixture
def named():
    """A module of the user's whose data sets have names, in the current folder."""
    Path("named.py").write_text(NAMED)
    yield
    sys.modules.pop("named", None)


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        ("named:folder", [f"pictures/{n}.png" for n in range(64)]),
        ("named:third", [f"third {n}" for n in range(64)]),
        ("named:some", ["pictures/5.png", "pictures/3.png"]),
        ("named.npz", [f"n{n}" for n in range(64)]),
    ],
)
@pytest.mark.usefixtures("named")
def test_inputs_and_classes_have_names(run, own, data, ids):
    classes = ["cat", "dog, small", "<b>owl</b>"]
    names = {"ids": np.array([f"n{n}" for n in range(64)]), "classes": np.array(classes)}
    np.savez("named.npz", x=own["x"].numpy(), y=(own["x"][:, 0] > 0).numpy(), **names)
    code, out, err = run("predict", data=data)
    assert (code, err) == (0, "")
    rows = read_rows("pred.csv")
    assert [row["id"] for row in rows] == ids
    plain = stochbn.predict(own["model"], None, own["x"])
    order = [int(re.sub(r"\D", "", name)) for name in ids]
    assert [row["predicted"] for row in rows] == [classes[int(plain.classes[n])] for n in order]
    assert [row["label"] for row in rows] == [classes[int(own["x"][n, 0] > 0)] for n in order]
    for number, name in enumerate(classes):
        found = [float(row[f"probs_{name}"]) for row in rows]
        assert found == pytest.approx(plain.probs[order, number].tolist(), rel=1e-5)
    shown = rows[int(torch.tensor([float(row["entropy"]) for row in rows]).argmax())]
    assert f"│ {shown['id']} " in out


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("named")
def test_a_shuffled_loader_has_no_file_names_to_trust(run):
    code, _, err = run("predict", data="named:shuffled")
    assert (code, err.count("The DataLoader shuffles")) == (0, 1)
    assert "id" not in read_rows("pred.csv")[0]


def test_names_of_classes_from_a_file(run, own):
    Path("classes.txt").write_text("cat\n\nköter \nowl\n")
    assert run("predict", classes="classes.txt", link="sigmoid")[0] == 0
    assert {"probs_cat", "entropy_köter", "label"} <= read_rows("pred.csv")[0].keys()
    assert run("predict", classes="classes.txt", out="pred.npz")[0] == 0
    with np.load("pred.npz") as arrays:
        assert arrays["classes"].tolist() == ["cat", "köter", "owl"]
        assert arrays["predicted"].dtype.kind == "i"


def test_names_are_printed_as_they_are(run, own):
    ids = np.array(["[red]x[/red]"] * 63 + ["\x1b[2Jx"])
    np.savez("odd.npz", x=own["x"].numpy(), ids=ids)
    code, out, _ = run("predict", data="odd.npz")
    assert code == 0
    assert "[red]x[/red]" in out
    assert "\x1b" not in out


def test_json_is_all_that_stdout_has(run, own):
    run("fit")
    code, out, err = run("predict", "--json", stats="net.sbn.safetensors", samples=4)
    assert (code, err) == (0, "")
    summary = json.loads(out)
    labels = (own["x"][:, 0] > 0).long()
    expected = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=4)
    assert (summary["command"], summary["out"], summary["num_inputs"]) == ("predict", "pred.csv", 64)
    assert summary["scores"]["nll"] == pytest.approx(float(stochbn.nll(expected.probs, labels)))
    assert summary["means"]["epistemic"] == pytest.approx(float(expected.epistemic.mean()), rel=1e-4)
    uncertain = expected.entropy.argsort(descending=True)[:5].tolist()
    assert [row["index"] for row in summary["most_uncertain"]] == uncertain
    code, out, err = run("predict", "--json", link="probit")
    assert (code, out) == (2, "")
    assert err.startswith("Error: Expected link to be one of")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "pred.txt"}, "Expected --out to end in .csv, .npz or .parquet, got pred.txt"),
        ({"stats": "missing.safetensors"}, "No such file or directory"),
        ({"stats": "model.pt"}, "Expected a file written by stats.save, got model.pt"),
        ({"link": "probit"}, "Expected link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"),
        (
            {"samples": "many"},
            "Invalid value for '--samples': Expected a whole number of at least 1, or auto, got 'many'",
        ),
        ({"samples": 0}, "Expected a whole number of at least 1, or auto, got '0'"),
        ({"samples": "auto"}, "got a plain network"),
        ({"samples": "auto", "dropout": True, "compile": True}, "Expected --compile with a fixed num_samples"),
        ({"samples": "auto", "dropout": True, "tolerance": 0}, "Expected a tolerance above 0, got 0.0"),
        ({"classes": "missing.txt"}, "Expected a file with the name of a class in each line, got no file missing.txt"),
        ({"classes": "two.txt"}, "Expected names of 3 classes, as many as the network has outputs, got 2"),
        ({"classes": "twice.txt"}, "Expected a name of its own for each class, got 'a' twice"),
        ({"data": "named:partly"}, "Expected an id for each of 64 inputs, got 32"),
    ],
)
@pytest.mark.usefixtures("named")
def test_what_cannot_be_used_is_one_line_and_leaves_the_old_file(refused, options, message):
    Path("two.txt").write_text("a\nb\n")
    Path("twice.txt").write_text("a\nb\na\n")
    Path("pred.csv").write_text("old")
    assert message in refused("predict", **options)
    assert Path("pred.csv").read_text() == "old"
