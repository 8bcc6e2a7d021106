"""`fit`, `tune`, `predict` and `export` on a user's files give the library's numbers."""

import csv
import re
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stochbn

pytestmark = pytest.mark.usefixtures("own")


def read_csv(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in rows[0]}


def test_fit_and_predict_give_the_library_s_numbers(run, own):
    code, out, err = run("fit")
    assert (code, err) == (0, "")
    assert "Fitted Factorized(2 layers, 11 channels, batch_size=16, num_batches=4)." in out
    labels = (own["x"][:, 0] > 0).long()
    loader = DataLoader(TensorDataset(own["x"], labels), 16, shuffle=True, generator=torch.Generator().manual_seed(0))
    expected = stochbn.fit(own["model"], loader, progress=False)
    fitted = stochbn.load("net.sbn.safetensors")
    for name, layer in expected.layers.items():
        assert torch.equal(fitted.layers[name].moments.mean, layer.moments.mean)
        assert torch.equal(fitted.layers[name].moments.deviation, layer.moments.deviation)

    code, out, err = run("predict", stats="net.sbn.safetensors", samples=7, seed=3)
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
    run("fit", family="empirical", num_kept=3, conditioned=True)
    fitted = stochbn.load("net.sbn.safetensors")
    assert len(fitted.observations) == 3
    assert fitted.conditioned
    code, out, err = run("tune", choose="both", samples=4, num_groups=2)
    assert code == 0, err
    tuned = stochbn.load("tuned.sbn.safetensors")
    labels = (own["x"][:, 0] > 0).long()
    loader = DataLoader(TensorDataset(own["x"], labels), 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stochbn.tune(
            own["model"], fitted, loader, choose="both", num_groups=2, num_samples=4, progress=False
        )
    assert tuned.tuning == expected.tuning
    assert f"temperature {tuned.tuning.temperature:.3g}." in out
    assert str(tuned.tuning) in out
    assert run("predict", stats="tuned.sbn.safetensors", samples=3)[0] == 0
    prediction = stochbn.predict(own["model"], expected, own["x"], num_samples=3)
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], prediction.entropy)
    assert "Chose spread 1, temperature" in run("tune", choose="temperature")[1]


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_tuning_a_regression(run, own):
    run("fit")
    np.savez("targets.npz", x=own["x"].numpy(), y=own["model"](own["x"]).detach().numpy() + own["x"][:, :3].numpy())
    code, out, err = run("tune", data="targets.npz", link="identity", samples=2)
    assert code == 0, err
    noise = stochbn.load("tuned.sbn.safetensors").tuning.noise
    assert f"noise {noise:.3g}." in out
    run("predict", stats="tuned.sbn.safetensors", data="targets.npz", link="identity", samples=3)
    written = read_csv("pred.csv")
    expected = (written["std_0"].square() + noise**2).sqrt()
    torch.testing.assert_close(written["total_std_0"], expected, rtol=1e-4, atol=1e-6)


def test_tune_needs_labels(run, refused, own):
    run("fit")
    np.save("x.npy", own["x"].numpy())
    message = refused("tune", data="x.npy")
    assert "with labels" in message
    assert message.endswith("Give the data labels: y in the file, or the second of what the data set yields.\n")


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


def test_fit_takes_its_options(run, own):
    run("fit", layers="5", num_batches=3, data="own_nets:loader", batch_size=8, dropout=True)
    fitted = stochbn.load("net.sbn.safetensors")
    expected = stochbn.fit(
        own["model"], own["loader"](), batch_size=8, num_batches=3, layers=["5"], dropout=True, progress=False
    )
    assert repr(fitted) == "Factorized(1 layers, 5 channels, batch_size=8, num_batches=3)"
    assert fitted.layers["5"].moments.mean.shape == expected.layers["5"].moments.mean.shape
    assert fitted.excluded == ("1",)
    run("fit", layers="last", family="lowrank", rank=2)
    fitted = stochbn.load("net.sbn.safetensors")
    assert list(fitted.layers) == ["5"]
    assert len(fitted.factors) == 2


def test_every_command_sets_the_number_of_threads(run, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for command in ("fit", "tune", "predict", "export"):
        run(command, threads=3, out="model.pt")  # refused: it is an input
    assert used == [3, 3, 3, 3]


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


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"input": x.numpy()})
    return {output.name: torch.from_numpy(v) for output, v in zip(session.get_outputs(), outputs, strict=True)}


def test_export_writes_a_file_that_predicts(run, own):
    run("fit", dropout=True)
    options = {"samples": 7, "seed": 3, "dropout": True}
    code, out, err = run("export", stats="net.sbn.safetensors", out="deep/net.onnx", **options)
    assert (code, err) == (0, "")
    assert re.search(r"^Wrote deep/net.onnx, \d+ kB$", out, re.MULTILINE)
    assert "\nTakes input: float32 (N, 4)\n" in out
    shapes = ("probs: float32 (N, 3)", *(f"{name}: float32 (N)" for name in ("entropy", "aleatoric", "epistemic")))
    assert f"\nReturns {', '.join(shapes)}\n" in out
    difference = re.search(r"^Differs from predict by (\S+) at most, on 8 inputs$", out, re.MULTILINE)
    assert float(difference[1]) < 1e-5
    stats = stochbn.load("net.sbn.safetensors")
    prediction = stochbn.predict(own["model"], stats, own["x"], num_samples=7, seed=3, dropout=True)
    found = run_onnx("deep/net.onnx", own["x"])
    for name in ("probs", "entropy", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name], getattr(prediction, name), rtol=0, atol=1e-5)


def test_export_of_the_network_itself_and_its_link(run, own):
    code, out, err = run("export", link="identity", data="own_nets:loader")
    assert (code, err) == (0, "")
    assert "without SBN" in out
    assert "\nReturns mean: float32 (N, 3), std: float32 (N, 3)\n" in out
    with torch.no_grad():
        torch.testing.assert_close(run_onnx("net.onnx", own["x"])["mean"], own["model"](own["x"]), rtol=0, atol=1e-5)


def test_export_for_torch(run, own, monkeypatch):
    monkeypatch.setattr("stochbn.inference.export.shutil.which", lambda _: None)  # a program, which is written sooner
    run("fit")
    assert run("export", stats="net.sbn.safetensors", samples=4, out="net.pt2")[0] == 0
    probs = torch.export.load("net.pt2").module()(own["x"])[0]
    prediction = stochbn.predict(own["model"], stochbn.load("net.sbn.safetensors"), own["x"], num_samples=4)
    torch.testing.assert_close(probs, prediction.probs, rtol=0, atol=1e-5)


def test_export_without_its_extra(refused, monkeypatch):
    monkeypatch.setattr("stochbn.inference.export.importlib.util.find_spec", lambda _: None)
    assert refused("export").endswith("Expected onnx for .onnx files. pip install 'stochbn[export]'.\n")


@pytest.mark.filterwarnings("ignore:Branching cannot be vectorised")
def test_export_says_what_it_cannot_capture(run):
    code, _, err = run("export", factory="own_nets:branching", samples=2, stats=None, dropout=True)
    assert code == 2
    assert err.splitlines()[-1].startswith("Error: Expected a model whose forward pass can be captured, got Branching:")
    assert not Path("net.onnx").exists()


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("fit", {"batch_size": None}, "Expected --batch-size, the mini-batch size of training"),
        ("fit", {"layers": "layer4.*"}, r"Expected layers= to name BatchNorm layers, got \['layer4.\*'\]"),
        ("fit", {"batch_size": 1}, "Invalid value for '--batch-size'"),
        ("fit", {"standard_error": 0}, "Expected a standard_error above 0, got 0.0"),
        ("fit", {"family": "cauchy"}, "Expected family to be one of .*, got 'cauchy'"),
        ("fit", {"checkpoint": None}, "Missing option '--checkpoint'"),
        ("predict", {"out": "pred.txt"}, "Expected --out to end in .csv or .npz, got pred.txt"),
        ("predict", {"stats": "missing.safetensors"}, "No such file or directory"),
        ("predict", {"stats": "model.pt"}, "Expected a file written by stats.save, got model.pt"),
        ("predict", {"link": "probit"}, "Expected link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"),
        ("export", {"out": "net.h5"}, "Expected --out to end in .onnx or .pt2, got net.h5"),
        ("export", {"stats": "missing.safetensors"}, "No such file or directory"),
        ("export", {"data": "own_nets:nothing"}, "Expected at least one input to try the file on, got none in own_ne"),
        ("export", {"data": "own_nets:wide"}, r"Expected a batch that Sequential can take, got Tensor\[8, 5\]"),
        ("export", {"link": "probit"}, "Expected link to be one of 'softmax', 'sigmoid', 'identity', got 'probit'"),
    ],
)
def test_options_that_do_not_fit_are_one_line(refused, command, options, message):
    assert re.search(message, refused(command, **options))


@pytest.mark.parametrize(
    ("command", "out"), [("fit", "data.npz"), ("tune", "net.sbn.safetensors"), ("predict", "data.npz")]
)
def test_no_input_is_overwritten(refused, command, out):
    assert f"Expected --out to be a file of its own, got an input: {out}." in refused(command, out=out)
