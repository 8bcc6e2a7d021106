"""The whole pipeline on a tiny embedded set: train, evaluate, report; and prediction files against the library."""

import csv
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save

import stochbn
from stochbn.distributions import storage
from stochbn.distributions.seeds import member_seed
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.data.splits import Split, draw_known_classes, load_split, to_inputs
from stochbn.experiments.evaluation.evaluate import evaluate, evaluate_network, is_evaluated
from stochbn.experiments.evaluation.inference import TrainedNetwork, fit, input_batches, tune
from stochbn.experiments.evaluation.plan import plan
from stochbn.experiments.files import File, diagnostics_path, prediction_path, unpack
from stochbn.experiments.methods import Drawing
from stochbn.experiments.report.report import write_report
from stochbn.experiments.training.checkpoints import CheckpointError, checkpoint_path, load_network, read_checkpoint
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, Experiment
from stochbn.experiments.training.train import train
from tiny import CIFAR, DROPOUT, PLAIN, TINY, measure_little, put_noise_for_cifar, run


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("recipe", "method", "sbn"),
    [
        (PLAIN, "plain", False),
        (PLAIN, "sbn", True),
        (PLAIN, "tuned", True),
        (PLAIN, "last", True),
        (DROPOUT, "dropout", False),
        (DROPOUT, "dropout+sbn", True),
        (DROPOUT, "dropout+tuned", True),
    ],
)
def test_files_hold_what_the_library_predicts(
    results: Path, splits: dict[str, Split], recipe: object, method: str, sbn: bool
) -> None:
    dropout = recipe is DROPOUT
    network = load_network(checkpoint_path(recipe, 0))
    stats = fit(network, splits["train"], recipe, dropout=dropout)
    num_samples = 6
    assert (stats.batch_size, stats.num_batches) == (64, 18)
    if method.endswith("tuned"):
        stats = tune(network, stats, splits["validation"], dropout=dropout)
    if method == "last":
        stats = fit(network, splits["train"], recipe, layers=["fc.norm"], family="empirical")
        stats, num_samples = replace(stats, conditioned=True), 18  # each mini-batch once
    file = File.read(prediction_path(results, recipe.name, 0))
    for part in ("test", "out-of-domain", "validation"):
        inputs = to_inputs(splits[part].images)
        pred = stochbn.predict(network, stats if sbn else None, inputs, num_samples=num_samples, dropout=dropout)
        probs, expected_entropy = unpack(file, method, part)
        torch.testing.assert_close(probs.float(), pred.probs, rtol=5e-3, atol=1e-3)
        torch.testing.assert_close(expected_entropy.float(), pred.aleatoric, rtol=2e-3, atol=1e-3)
    labels = splits["test"].labels
    assert torch.equal(file.tensors["labels"].long(), labels)
    assert stochbn.nll(unpack(file, method, "test")[0], labels).item() == pytest.approx(
        stochbn.nll(
            stochbn.predict(
                network, stats if sbn else None, input_batches(splits["test"]), num_samples=num_samples, dropout=dropout
            ).probs,
            labels,
        ).item(),
        rel=1e-3,
    )
    assert torch.equal(file.tensors["labels/validation"].long(), splits["validation"].labels)
    assert file.header["methods"][method]["num_samples"] == (num_samples if sbn or dropout else 1)
    assert len(file.tensors) == len(file.header["methods"]) * 3 * 2 + 2 == (26 if recipe is PLAIN else 20)


def test_headers_tell_where_numbers_come_from(results: Path) -> None:
    header = File.read(prediction_path(results, "tiny-dropout", 0)).header
    assert (header["experiment"], header["recipe"], header["seed"], header["epochs"]) == ("tiny", "tiny-dropout", 0, 2)
    assert (header["num_samples"], header["batch_size"], header["data"]) == (6, 64, "digits")
    assert header["out_of_domain"] == "glyphs"
    assert len(header["validation_nll"]) == len(header["train_loss"]) == len(header["validation_error"]) == 2
    assert header["settings"] == asdict(DROPOUT) | {"image_sizes": []}
    assert list(header["methods"]) == ["dropout", "dropout+sbn", "dropout+tuned"]
    assert {record["commit"] for record in header["methods"].values()} == {header["commit"]}
    assert header["versions"]["torch"] == torch.__version__
    assert header["command"] == "stochbn evaluate tiny --samples 6"
    assert re.fullmatch(r"[0-9a-f]{12}(-changed)?|unknown", header["commit"])


@pytest.mark.usefixtures("_cache")
def test_what_is_current_is_not_computed_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    before = {path.name: path.read_bytes() for path in (results / "predictions").iterdir()}
    for name in ("_predict", "measure"):
        monkeypatch.setattr(f"stochbn.experiments.evaluation.evaluate.{name}", refuse)
    evaluate(TINY, results, num_samples=6, console=Console(file=io.StringIO()))
    assert {path.name: path.read_bytes() for path in (results / "predictions").iterdir()} == before
    damaged = prediction_path(results, "tiny", 1)
    damaged.write_bytes(before[damaged.name][:-1])
    try:
        with pytest.raises(AssertionError, match="computed again"):
            evaluate(TINY, results, num_samples=6, console=Console(file=io.StringIO()))
    finally:
        damaged.write_bytes(before[damaged.name])


@pytest.mark.usefixtures("_cache")
def test_what_the_report_refuses_is_made_again(results: Path, tmp_path: Path) -> None:
    console, path = Console(file=io.StringIO()), prediction_path(tmp_path, "tiny", 0)
    sound = prediction_path(results, "tiny", 0).read_bytes()
    header, tensors, _ = storage.read(prediction_path(results, "tiny", 0), "stochbn")
    earlier = save(tensors, {"stochbn": json.dumps(header)})  # as versions without a checksum wrote it
    path.parent.mkdir()
    path.write_bytes(earlier)
    assert is_evaluated(PLAIN, 0, tmp_path, num_samples=6)
    evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=6, console=console)
    assert path.read_bytes() == earlier
    flipped = bytearray(sound)
    flipped[-9] ^= 1  # a number that could as well be this one
    wrong = save(tensors | {"labels": tensors["labels"] + 100}, {"stochbn": json.dumps(header)})
    for damaged in (bytes(flipped), wrong):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"got .*tiny-seed0\.safetensors \(.*\)\. Evaluate again\.$"):
            write_report(tmp_path, console=console)
        assert not is_evaluated(PLAIN, 0, tmp_path, num_samples=6)
        assert [run.state for run in plan(replace(TINY, num_seeds=1, num_dropout_seeds=0), tmp_path)] == ["left"]
        evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=6, console=console)
        again = File.read(path).tensors
        assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


@pytest.mark.usefixtures("_cache")
def test_an_interrupted_evaluation_goes_on_where_it_was(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[str] = []
    original = TrainedNetwork.predict

    def predict_some(trained: TrainedNetwork, drawing: Drawing, split: Split, **options: int) -> stochbn.Prediction:
        if len(predicted) == 4:  # in the middle of the second method
            predicted.append("stopped")
            raise KeyboardInterrupt
        predicted.append(split.name)
        return original(trained, drawing, split, **options)

    monkeypatch.setattr(TrainedNetwork, "predict", predict_some)
    console = Console(file=io.StringIO())
    path = prediction_path(tmp_path, "tiny", 0)
    with pytest.raises(KeyboardInterrupt):
        evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=6, console=console)
    assert list(File.read(path).header["methods"]) == ["plain"]
    assert evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=6, console=console) == path
    assert len(predicted) == 4 + 1 + 3 * 3  # plain is not predicted again
    whole, resumed = File.read(prediction_path(results, "tiny", 0)), File.read(path)
    assert resumed.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in whole.tensors.items())
    # Of another number of draws, what is drawn at random is predicted again, and the rest is kept.
    evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=4, console=console)
    assert len(predicted) == 4 + 1 + 3 * 3 + 2 * 3
    again = File.read(path)
    assert torch.equal(again.tensors["last/test/log_probs"], whole.tensors["last/test/log_probs"])
    assert {key: record["num_samples"] for key, record in again.header["methods"].items()} == {
        "plain": 1,
        "sbn": 4,
        "tuned": 4,
        "last": 18,
    }


def test_one_network_of_cifar5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    put_noise_for_cifar(monkeypatch)
    measure_little(monkeypatch)
    dropout = replace(CIFAR, name="small-dropout", dropout=0.5)
    experiment = Experiment("small", CIFAR, 2, dropout, 1)
    console = Console(file=io.StringIO())
    with pytest.raises(CheckpointError, match=r"Expected a checkpoint .*got none\. Train the network first"):
        evaluate_network(experiment, CIFAR, 1, tmp_path, console=console)
    network = load_network(train(CIFAR, 1, console=console))  # the first is still in training, say
    file = File.read(evaluate_network(experiment, CIFAR, 1, tmp_path, console=console))
    lasts = ["last@0.50", "last@0.71", "last@1.00", "last@1.41", "last@2.00", "last@2.83"]
    assert list(file.header["methods"]) == ["plain", "sbn", *lasts, "stage@0.71", "stage@1.00", "stage@1.41"]
    assert [file.header["methods"][key]["num_samples"] for key in ("plain", "sbn", "last@0.50", "stage@1.41")] == [
        *(1, 4, 8, 6),
    ]
    assert (file.header["batch_size"], file.header["num_samples"], file.header["seed"]) == (16, 4, 1)
    assert file.header["command"] == "stochbn evaluate small"
    assert not [name for name in file.tensors if file.tensors[name].isnan().any()]

    splits = {part: load_split("cifar5", part) for part in ("train", "validation", "test", "out-of-domain")}
    patterns = {"last": ["conv8.norm"], "stage": ["conv7.norm", "conv8.norm"]}
    for key, layers in patterns.items():
        stats = fit(network, splits["train"], CIFAR, layers=layers, family="empirical", num_batches=9)
        stats = replace(stats, conditioned=True, tuning=stochbn.Tuning(2**0.5))
        assert list(stats.layers) == layers
        for part in ("test", "out-of-domain", "validation"):
            inputs = to_inputs(splits[part].images)
            pred = stochbn.predict(
                network, stats, inputs, num_samples={"last": 8, "stage": 6}[key], seed=member_seed(0, 1)
            )
            probs, expected_entropy = unpack(file, f"{key}@1.41", part)
            torch.testing.assert_close(probs.float(), pred.probs, rtol=5e-3, atol=1e-3)
            torch.testing.assert_close(expected_entropy.float(), pred.aleatoric, rtol=2e-3, atol=1e-3)

    train(CIFAR, 0, console=console)
    train(dropout, 0, console=console)
    evaluate(experiment, tmp_path, console=console)
    file = File.read(prediction_path(tmp_path, "small-dropout", 0))
    assert list(file.header["methods"]) == ["dropout", "dropout+sbn"]
    measured = File.read(diagnostics_path(tmp_path))
    assert [row["batch_size"] for row in measured.header["by_batch_size"]] == [8, 16]
    assert not {"bound", "statistics", "by_samples"} & measured.header.keys()  # the paper has these for LeNet-5
    assert write_report(tmp_path, console=console).exists()


@pytest.mark.usefixtures("_cache")
def test_nothing_is_chosen_by_test_labels(results: Path, splits: dict[str, Split], tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(1)
    for part in ("test", "out-of-domain"):
        labels = torch.randint(0, 10, splits[part].labels.shape, generator=random)
        splits[part] = replace(splits[part], labels=labels)
    console = Console(file=io.StringIO())
    noisy = File.read(evaluate_network(TINY, PLAIN, 0, tmp_path, num_samples=6, splits=splits, console=console))
    file = File.read(prediction_path(results, "tiny", 0))
    changed = {name for name, tensor in file.tensors.items() if not torch.equal(noisy.tensors[name], tensor)}
    assert changed == {"labels"}


def test_known_classes_are_drawn_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    put_noise_for_cifar(monkeypatch)
    monkeypatch.setitem(RECIPES, "small", CIFAR)
    monkeypatch.setitem(EXPERIMENTS, "small", Experiment("small", CIFAR, 1))
    measure_little(monkeypatch)
    options = ("--samples", "2", "--threads", "1")
    assert run("train", "small", "--class-seed", "1", "--threads", "1") == 0
    assert run("evaluate", "small", "--class-seed", "1", *options) == 0
    header = File.read(tmp_path / "results/small-classes1/predictions/small-classes1-seed0.safetensors").header
    assert header["classes"] == ["abcdefghij"[known] for known in draw_known_classes(1)] != list("abcde")
    assert header["command"] == "stochbn evaluate small --class-seed 1 --samples 2"
    assert header["options"] == "--class-seed 1"

    assert run("evaluate", "small", *options) == run("evaluate", "small", "--class-seed", "2", *options) == 2
    assert run("train", "small", "--class-seed", "2", "--threads", "1") == 0
    checkpoints = {path.parent.name: read_checkpoint(path) for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert {name: checkpoint.recipe.class_seed for name, checkpoint in checkpoints.items()} == {
        "small-classes1": 1,
        "small-classes2": 2,
    }


def test_networks_that_differ_in_an_option_are_not_reported_together(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = File.read(prediction_path(results, "tiny", 0))
    file.write(prediction_path(tmp_path, "tiny", 0))
    File(file.header | {"options": "--optimizer sgd"}, file.tensors).write(prediction_path(tmp_path, "tiny-sgd", 0))
    assert run("report", str(tmp_path)) == 2
    assert "of one experiment, got options --optimizer sgd and None in" in capsys.readouterr().err


def test_a_checkpoint_of_another_recipe_is_refused(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(results / "cache"))
    other = replace(TINY, recipe=replace(PLAIN, batch_size=32))
    with pytest.raises(CheckpointError, match=r"of tiny as it is now, got batch_size 64 instead of 32: .* Delete it"):
        evaluate(other, tmp_path)


@pytest.mark.usefixtures("_cache")
def test_missing_networks_are_named(tmp_path: Path) -> None:
    output = io.StringIO()
    only = replace(TINY, recipe=replace(PLAIN, name="absent"))
    evaluate(only, tmp_path, num_samples=2, console=Console(file=output))
    assert "absent seed 0: not trained to the end, left out" in output.getvalue()
    assert "absent seed 0 is not trained: no diagnostics" in output.getvalue()
    assert prediction_path(tmp_path, "tiny-dropout", 0).exists()


def test_untrained_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"trained networks of lenet5, got none\. Train them with `stochbn train"):
        evaluate(EXPERIMENTS["lenet5"], tmp_path)


def test_report_of_what_was_evaluated(results: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    page = write_report(results, console=console)
    assert page == results / "report.html"
    html, markdown, shown = page.read_text(), (results / "table.md").read_text(), console.file.getvalue()
    with (results / "table.csv").open(newline="") as table:
        scores = {(row["method"], row["metric"]): float(row["value"]) for row in csv.DictReader(table)}
    for key in ("plain", "plain+temperature", "sbn", "last", "ensemble", "ensemble+sbn", "dropout", "dropout+sbn"):
        assert {(key, metric) for metric in ("error_percent", "nll", "auroc_entropy")} <= scores.keys()
    for label in ("One network", "SBN", "Deep Ensembles", "Deep Ensembles + SBN", "Dropout", "Dropout + SBN"):
        assert f"\n| {label} |" in markdown
        assert f">{label}<" in html
        assert f"\n{label} " in shown
    file = File.read(prediction_path(results, "tiny-dropout", 0))
    nll = stochbn.nll(unpack(file, "dropout+sbn", "test")[0], file.tensors["labels"].long()).item()
    assert scores["dropout+sbn", "nll"] == pytest.approx(nll, rel=1e-5)

    for appendix in ("Appendix B, n = 18 mini-batches of 64", "Appendix A, n = 10 training inputs"):
        assert appendix in markdown
        assert appendix in shown
    drawn = list((results / "figures").glob("*.png"))
    assert len(drawn) == html.count("<img ") == 12
    for path in drawn:
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 5, path.name
