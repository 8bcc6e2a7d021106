"""The whole pipeline on a tiny embedded set: train, evaluate, report; and prediction files against the library."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy import stats as scipy_stats

import stochbn
from stochbn.cli import main as cli
from stochbn.experiments.data import splits as data
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.data.splits import Split, draw_known_classes, load_split, to_inputs
from stochbn.experiments.evaluation import diagnostics
from stochbn.experiments.evaluation.evaluate import evaluate
from stochbn.experiments.evaluation.inference import fit, input_batches, tune
from stochbn.experiments.files import File, average, diagnostics_path, pack, prediction_path, unpack
from stochbn.experiments.report.report import write_report
from stochbn.experiments.training.checkpoints import CheckpointError, checkpoint_path, load_network, read_checkpoint
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, Experiment
from stochbn.experiments.training.train import train

PLAIN = replace(RECIPES["digits"], name="tiny", epochs=2, width=0.1)
DROPOUT = replace(PLAIN, name="tiny-dropout", dropout=0.2)
TINY = Experiment("tiny", PLAIN, 2, DROPOUT, 1)


def measure_little(patch: pytest.MonkeyPatch) -> None:
    counts = {"SAMPLE_COUNTS": (1, 4), "BATCH_SIZES": (8, 16), "NUM_EXACT": 20, "NUM_BOUND": 10, "NUM_CURVE": 100}
    for name, count in counts.items():
        patch.setattr(diagnostics, name, count)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the tiny experiment once, from training to the page, by the real command."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCHBN_DATA", str(folder / "cache"))
        patch.setitem(EXPERIMENTS, "tiny", TINY)
        measure_little(patch)
        assert run("reproduce", "tiny", "--out", str(folder), "--samples", "6", "--threads", "1") == 0
    return folder


@pytest.fixture
def splits() -> dict[str, Split]:
    return {part: load_split("digits", part) for part in ("train", "validation", "test", "out-of-domain")}


@pytest.fixture
def _cache(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(results / "cache"))


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("recipe", "method", "sbn"),
    [
        (PLAIN, "plain", False),
        (PLAIN, "sbn", True),
        (PLAIN, "tuned", True),
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
    assert (stats.batch_size, stats.num_batches) == (16, 75)
    if method.endswith("tuned"):
        stats = tune(network, stats, splits["validation"], dropout=dropout)
    file = File.read(prediction_path(results, recipe.name, 0))
    for part in ("test", "out-of-domain"):
        inputs = to_inputs(splits[part].images)
        pred = stochbn.predict(network, stats if sbn else None, inputs, num_samples=6, dropout=dropout)
        probs, expected_entropy = unpack(file, method, part)
        torch.testing.assert_close(probs.float(), pred.probs, rtol=5e-3, atol=1e-3)
        torch.testing.assert_close(expected_entropy.float(), pred.aleatoric, rtol=2e-3, atol=1e-3)
    labels = splits["test"].labels
    assert torch.equal(file.tensors["labels"].long(), labels)
    assert stochbn.nll(unpack(file, method, "test")[0], labels).item() == pytest.approx(
        stochbn.nll(
            stochbn.predict(
                network, stats if sbn else None, input_batches(splits["test"]), num_samples=6, dropout=dropout
            ).probs,
            labels,
        ).item(),
        rel=1e-3,
    )
    assert f"{method}/test/log_probs" in file.tensors
    assert len(file.tensors) == 3 * 2 * 2 + 1


def test_headers_tell_where_numbers_come_from(results: Path) -> None:
    header = File.read(prediction_path(results, "tiny-dropout", 0)).header
    assert (header["experiment"], header["recipe"], header["seed"], header["epochs"]) == ("tiny", "tiny-dropout", 0, 2)
    assert (header["num_samples"], header["batch_size"], header["data"]) == (6, 16, "digits")
    assert header["out_of_domain"] == "glyphs"
    assert len(header["validation_nll"]) == 2
    assert header["versions"]["torch"] == torch.__version__
    assert header["command"] == "stochbn evaluate tiny --samples 6"
    assert re.fullmatch(r"[0-9a-f]{12}(-changed)?|unknown", header["commit"])


@pytest.mark.usefixtures("_cache")
def test_what_is_current_is_not_computed_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    before = {path.name: path.read_bytes() for path in (results / "predictions").iterdir()}
    for name in ("predict_network", "measure"):
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
def test_diagnostics(results: Path, splits: dict[str, Split]) -> None:
    file = File.read(diagnostics_path(results))
    header, tensors = file.header, file.tensors
    assert [row["num_samples"] for row in header["by_samples"]] == [1, 4]
    assert [row["batch_size"] for row in header["by_batch_size"]] == [8, 16]
    for stage in ("before", "after"):
        assert header["bound"][stage]["lower"][0] < header["bound"][stage]["marginal"][0]
    assert header["bound"]["after"]["lower"][0] > header["bound"]["before"]["lower"][0]
    assert (header["bound"]["num_examples"], header["bound"]["num_samples"]) == (10, 6)
    assert unpack(file, "exact", "test")[0].shape == (20, 10)
    assert header["statistics"] == {
        "layers": ["conv1.norm", "conv2.norm", "fc.norm"],
        "num_batches": 75,
        "batch_size": 16,
    }
    images = tensors["gallery/uncertain test/images"]
    assert images.shape == (8, 1, 28, 28)
    member_probs, _ = average([unpack(File.read(prediction_path(results, "tiny", k)), "sbn", "test") for k in (0, 1)])
    entropy = stochbn.entropy(member_probs)
    assert torch.equal(images[0], splits["test"].images[entropy.argmax()])
    assert tensors["gallery/certain test/entropy"].max() <= tensors["gallery/uncertain test/entropy"].min()
    assert header["gallery"]["method"] == "Deep Ensembles (2) + SBN"


@pytest.mark.usefixtures("_cache")
def test_distances_of_appendix_b(results: Path, splits: dict[str, Split]) -> None:
    tensors = File.read(diagnostics_path(results)).tensors
    stats = fit(load_network(checkpoint_path(PLAIN, 0)), splits["train"], PLAIN)
    for layer in ("conv1.norm", "fc.norm"):
        channels = tensors[f"statistics/{layer}/channels"]
        r_mu, r_sigma = stats.layers[layer].r_mu, stats.layers[layer].r_sigma
        torch.testing.assert_close(tensors[f"statistics/{layer}/centre"][0], r_mu.loc[channels], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tensors[f"statistics/{layer}/std"][0], r_mu.scale[channels], rtol=1e-4, atol=1e-7)
        observed = tensors[f"statistics/{layer}/observed"].double().numpy()
        for position, channel in enumerate(channels.tolist()):
            values, ks = observed[:, 0, position], tensors[f"statistics/{layer}/ks"][0, channel].item()
            if np.isfinite(ks):
                family = scipy_stats.norm(r_mu.loc[channel].item(), r_mu.scale[channel].item())
                assert ks == pytest.approx(scipy_stats.kstest(values, family.cdf).statistic, abs=1e-3)
            sigmas, ks = np.exp(observed[:, 1, position] / 2), tensors[f"statistics/{layer}/ks"][1, channel].item()
            log_normal = scipy_stats.lognorm(r_sigma.scale[channel].item(), scale=r_sigma.loc[channel].exp().item())
            if np.isfinite(ks):
                assert ks == pytest.approx(scipy_stats.kstest(sigmas, log_normal.cdf).statistic, abs=1e-3)
        assert tensors[f"statistics/{layer}/ks"].isfinite().all(0).any()


def test_bound_before_training_is_that_of_the_initial_network(
    results: Path, splits: dict[str, Split], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path))
    measure_little(monkeypatch)
    bounds = []
    for seed in (0, 1):  # trained at rate 0, a network stays what it was
        still = load_network(train(replace(PLAIN, name="still", epochs=1, learning_rate=0.0), seed))
        bounds.append(diagnostics._bound(still, PLAIN, splits["train"], num_samples=6, progress=False)["after"])
    before = File.read(diagnostics_path(results)).header["bound"]["before"]
    assert {key: list(value) for key, value in bounds[0].items()} == before
    assert bounds[1] != bounds[0]


def test_known_classes_are_drawn_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_noise(train: bool, folder: Path | None) -> Split:
        labels = torch.arange(400 if train else 200) % 10
        random = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=random)
        return Split("cifar10", images, labels, tuple("abcdefghij"))

    recipe = replace(RECIPES["vgg11"], name="small", epochs=6, width=0.02)
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(data._LOADERS, "cifar10", load_noise)
    monkeypatch.setitem(data._NUM_VALIDATION, "cifar10", 100)
    monkeypatch.setitem(RECIPES, "small", recipe)
    monkeypatch.setitem(EXPERIMENTS, "small", Experiment("small", recipe, 1))
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
    assert "of one experiment, got options --optimizer sgd and None. Keep each" in capsys.readouterr().err


def test_a_checkpoint_of_another_recipe_is_refused(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(results / "cache"))
    other = replace(TINY, recipe=replace(PLAIN, batch_size=32))
    with pytest.raises(CheckpointError, match=r"of tiny as it is now, got one of another recipe"):
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


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    for content in (None, b"", b"not safetensors"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"a file that `stochbn evaluate` wrote, got .*Evaluate again"):
            File.read(path)


@pytest.mark.parametrize("scale", [8, 20])
def test_files_keep_likelihoods_and_tiny_uncertainties(scale: int) -> None:
    logits = scale * torch.randn(2000, 10)
    models = [torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False)) for _ in range(3)]
    with torch.no_grad():
        for model in models:
            model[0].weight.copy_(torch.eye(10) + 0.01 * torch.randn(10, 10))
    pred = stochbn.predict(models, None, logits)
    labels = logits.argmax(1)
    probs, expected_entropy = unpack(File({}, pack(pred, "plain", "test")), "plain", "test")
    assert stochbn.nll(probs, labels).item() == pytest.approx(stochbn.nll(pred.probs, labels).item(), rel=2e-3)
    information = (stochbn.entropy(probs) - expected_entropy).clamp_min(0)
    exact = stochbn.mutual_information(pred.samples.double())
    assert scipy_stats.spearmanr(information, exact).statistic > 0.98
    assert (expected_entropy > 0).double().mean() > 0.95


def test_report_of_what_was_evaluated(results: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    page = write_report(results, console=console)
    assert page == results / "report.html"
    html, markdown, shown = page.read_text(), (results / "table.md").read_text(), console.file.getvalue()
    with (results / "table.csv").open(newline="") as table:
        scores = {(row["method"], row["metric"]): float(row["value"]) for row in csv.DictReader(table)}
    for method in ("One network", "SBN", "Deep Ensembles", "Deep Ensembles + SBN", "Dropout", "Dropout + SBN"):
        assert f"\n| {method} |" in markdown
        assert f">{method}<" in html
        assert f"\n{method} " in shown
        assert {(method, metric) for metric in ("error_percent", "nll", "auroc_entropy")} <= scores.keys()
    file = File.read(prediction_path(results, "tiny-dropout", 0))
    nll = stochbn.nll(unpack(file, "dropout+sbn", "test")[0], file.tensors["labels"].long()).item()
    assert scores["Dropout + SBN", "nll"] == pytest.approx(nll, rel=1e-5)

    for appendix in ("Appendix B, n = 75 mini-batches of 16", "Appendix A, n = 10 training inputs"):
        assert appendix in markdown
        assert appendix in shown
    drawn = list((results / "figures").glob("*.png"))
    assert len(drawn) == html.count("<img ") == 13
    for path in drawn:
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 5, path.name
