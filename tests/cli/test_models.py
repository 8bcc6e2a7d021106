"""`fit`, `tune` and `export` on a user's files give the library's numbers."""

import csv
import json
import re
import shlex
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
        ("fit", {"layers": "layer4.*"}, r"Expected --layers to name BatchNorm layers, got \['layer4.\*'\]"),
        ("fit", {"batch_size": 1}, "Invalid value for '--batch-size'"),
        ("fit", {"standard_error": 0}, "Expected a standard_error above 0, got 0.0"),
        ("fit", {"family": "cauchy"}, "Expected family to be one of .*, got 'cauchy'"),
        ("fit", {"checkpoint": None}, "Missing option '--checkpoint'"),
        ("tune", {"stats": "missing.safetensors"}, "No such file or directory"),
        ("tune", {"out": ["a.sbn", "b.sbn"]}, "Expected an --out for each --checkpoint, got 2 for 1"),
        ("tune", {"stats": ["a.sbn", "b.sbn"]}, "Expected a --stats for each --checkpoint, in the same order, got 2"),
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


@pytest.mark.parametrize("command", ["fit", "tune", "predict", "export"])
def test_a_folder_appears_only_with_its_file(refused, command):
    ending = {"predict": "csv", "export": "onnx"}.get(command, "safetensors")
    refused(
        command, checkpoint="missing.pt", stats="missing.sbn" if command != "fit" else None, out=f"deep/net.{ending}"
    )
    assert not Path("deep").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("data.npz/net.safetensors", "Expected to write to data.npz/net.safetensors, got .*data.npz, which takes no"),
        ("folder", "Expected --out to be a file, got a folder: folder"),
    ],
)
def test_what_cannot_be_written_is_known_before_the_work(refused, out, message):
    Path("folder").mkdir()
    assert re.search(message, refused("fit", out=out, checkpoint="missing.pt"))


@pytest.fixture
def ensemble(run, own):
    """Two networks of the user's with their statistics: models, distributions, and the options that name them."""
    torch.manual_seed(1)
    other = own["build"]()
    for batch in own["x"].split(16):
        other(batch)
    torch.save(other.state_dict(), "other.pt")
    for name in ("model", "other"):
        assert run("fit", checkpoint=f"{name}.pt", out=f"{name}.sbn")[0] == 0
    options = {"checkpoint": ["model.pt", "other.pt"], "stats": ["model.sbn", "other.sbn"]}
    return [own["model"], other.eval()], [stochbn.load(path) for path in options["stats"]], options


def test_an_ensemble_is_predicted_and_exported_as_the_library_does(run, own, ensemble):
    models, stats, options = ensemble
    expected = stochbn.predict(models, stats, own["x"], num_samples=4)
    assert run("predict", **options, samples=4)[0] == 0
    torch.testing.assert_close(read_csv("pred.csv")["entropy"], expected.entropy)
    for factory in ("own_nets:build", "own_nets:network"):  # the second is one object for all weights
        assert run("predict", factory=factory, checkpoint=options["checkpoint"])[0] == 0
        plain = stochbn.predict(models, None, own["x"])
        torch.testing.assert_close(read_csv("pred.csv")["entropy"], plain.entropy)
    assert run("export", **options, samples=4)[0] == 0
    torch.testing.assert_close(run_onnx("net.onnx", own["x"])["probs"], expected.probs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_an_ensemble_is_tuned_together(run, own, ensemble):
    models, stats, options = ensemble
    code, out, _ = run("tune", **options, out=["a.sbn", "deep/b.sbn"], samples=2)
    assert code == 0
    loader = DataLoader(TensorDataset(own["x"], (own["x"][:, 0] > 0).long()), 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stochbn.tune(models, stats, loader, num_samples=2, progress=False)
    for path, member in zip(("a.sbn", "deep/b.sbn"), expected, strict=True):
        assert stochbn.load(path).tuning == member.tuning
    assert "--checkpoint model.pt --checkpoint other.pt --stats a.sbn --stats deep/b.sbn --data TEST" in out


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (
            "predict",
            {"stats": ["model.sbn"]},
            "Expected a --stats for each --checkpoint, in the same order, got 1 for 2",
        ),
        (
            "export",
            {"stats": ["model.sbn"]},
            "Expected a --stats for each --checkpoint, in the same order, got 1 for 2",
        ),
        ("predict", {"checkpoint": ["model.pt", "./model.pt"]}, "got one twice: model.pt, model.pt"),
        ("tune", {"out": ["a.sbn", "./a.sbn"]}, "Expected another --out for each network, got a.sbn twice"),
        ("tune", {"out": ["other.sbn", "a.sbn"]}, "got an input: other.sbn"),
        ("tune", {"out": "a.sbn"}, "Expected an --out for each --checkpoint, got 1 for 2"),
    ],
)
def test_ensembles_that_do_not_fit_together(refused, ensemble, command, options, message):
    given = {key: value for key, value in ensemble[2].items() if command != "predict" or key == "checkpoint"}
    files = sorted(Path().iterdir())
    assert message in refused(command, **given | options)
    assert sorted(Path().iterdir()) == files


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_json_is_all_that_stdout_has(run, own):
    summaries = {}
    for command, options in {"fit": {}, "tune": {"samples": 2}, "export": {"stats": "tuned.sbn.safetensors"}}.items():
        code, out, err = run(command, json=True, **options)
        assert code == 0
        assert not re.sub(r"Warning: .*\n", "", err)
        summaries[command] = json.loads(out)  # the whole of it
        assert summaries[command]["command"] == command
        assert out.count("\n") == 1
    assert summaries["fit"]["layers"] == {"1": 6, "5": 5}
    assert (summaries["fit"]["family"], summaries["fit"]["num_batches"]) == ("factorized", 4)
    tuning = stochbn.load("tuned.sbn.safetensors").tuning
    assert summaries["tune"]["out"] == ["tuned.sbn.safetensors"]
    assert summaries["tune"]["temperature"] == tuning.temperature
    assert len(summaries["tune"]["scores"]) == len(tuning.scores)
    assert summaries["export"]["num_bytes"] == Path("net.onnx").stat().st_size
    assert summaries["export"]["takes"] == ["input: float32 (N, 4)"]
    assert run("fit", json=True, checkpoint="missing.pt")[1] == ""
    assert "Wrote net.sbn" in run("fit")[1]  # the next command prints text again


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_what_comes_next_can_be_copied(run):
    Path("my net.pt").write_bytes(Path("model.pt").read_bytes())
    line = run("fit", checkpoint="my net.pt")[1].splitlines()[2]
    command = line.partition(": ")[2].replace("VALIDATION", "data.npz").replace("TUNED", "tuned.sbn")
    code, out, _ = run(*shlex.split(command)[1:], needed=False)
    assert code == 0
    command = out.splitlines()[-2].partition(": ")[2].replace("TEST", "data.npz")
    assert run(*shlex.split(command)[1:], needed=False)[0] == 0
    assert Path("pred.csv").exists()
