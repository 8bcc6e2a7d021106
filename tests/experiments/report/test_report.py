import csv
import io
import json
import math
import re
import shutil
import subprocess
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from scipy.integrate import trapezoid
from sklearn import metrics
from torch.nn import functional as F

from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import PARTS, File, diagnostics_path, prediction_path
from stochbn.experiments.report import diagnostic_figures, figures, report
from stochbn.experiments.report.claims import check_claims, check_reproduction, dominance
from stochbn.experiments.report.paper import compare
from stochbn.experiments.report.report import read_files, write_report
from stochbn.experiments.report.scores import METRICS, Output, Score, collect, detect, measure, score, select_exact
from stochbn.experiments.report.tables import Grid, table_1, to_markdown

CLASSES = list("0123456789")
LAYERS = ["conv1.norm", "conv2.norm", "fc.norm"]
METHODS = ["One network", "SBN", "Deep Ensembles", "Deep Ensembles + SBN", "Dropout", "Dropout + SBN"]
VOID = {"meta", "img", "br", "link", "hr", "input"}


def make_files(folder, *, num_plain=3, num_dropout=2, size=400, parts=PARTS, experiment="lenet5", **header):
    """Writes prediction files of networks that know most test inputs and nothing of the others."""
    torch.manual_seed(1)
    labels = torch.randint(10, (size,))
    evidence = {"test": 9 * F.one_hot(labels, 10) * torch.rand(size, 1).sqrt(), "out-of-domain": torch.zeros(size, 10)}
    runs = [(experiment, seed, ("plain", "sbn")) for seed in range(num_plain)]
    runs += [(f"{experiment}-dropout", seed, ("dropout", "dropout+sbn")) for seed in range(num_dropout)]
    for recipe, seed, methods in runs:
        tensors = {"labels": labels.to(torch.uint8)}
        for part in parts:
            logits = evidence[part] + 1.5 * torch.randn(size, 10)
            for method in methods:
                noise = {"plain": 0.0, "sbn": 0.4, "dropout": 1.0, "dropout+sbn": 1.8}[method]
                samples = (logits + noise * torch.randn(1 if method == "plain" else 8, size, 10)).softmax(2)
                tensors[f"{method}/{part}/log_probs"] = samples.mean(0).log().half()
                tensors[f"{method}/{part}/expected_entropy"] = torch.special.entr(samples).sum(2).mean(0).half()
        described = {
            "kind": "predictions",
            "experiment": experiment,
            "recipe": recipe,
            "seed": seed,
            "num_samples": 8,
            "batch_size": 16,
            "epochs": 5,
            "data": "mnist",
            "out_of_domain": "notmnist",
            "classes": CLASSES,
            "validation_nll": [0.1 / (1 + epoch) for epoch in range(5)],
            "train_seconds": 90.0,
            "draw_seed": 0,
            "command": "stochbn evaluate lenet5",
            "commit": "abc123",
            "versions": {"stochbn": "0.1", "torch": "2"},
        }
        File(described | header, tensors).write(prediction_path(folder, recipe, seed))
    return folder


def make_diagnostics(folder, *, num_batches=60, num_exact=50):
    torch.manual_seed(2)
    file = File.read(prediction_path(folder, "lenet5", 0))
    tensors = {"labels": file.tensors["labels"]}
    for part in PARTS:
        tensors[f"exact/{part}/index"] = torch.arange(num_exact)
        for name in ("log_probs", "expected_entropy"):
            tensors[f"exact/{part}/{name}"] = file.tensors[f"sbn/{part}/{name}"][:num_exact]
    for layer in LAYERS:
        observed = torch.randn(num_batches, 2, 3, dtype=torch.float64)
        observed[:, :, 2] = 0.5  # a dead channel
        distances = torch.rand(2, 20, dtype=torch.float64) / 10
        distances[:, 19] = math.nan
        tensors |= {
            f"statistics/{layer}/channels": torch.tensor([0, 9, 19]),
            f"statistics/{layer}/observed": observed.float(),
            f"statistics/{layer}/centre": observed.mean(0),
            f"statistics/{layer}/std": observed.std(0),
            f"statistics/{layer}/ks": distances,
        }
    for group in diagnostic_figures.GALLERY:
        tensors |= {
            f"gallery/{group}/images": torch.randint(256, (12, 1, 28, 28), dtype=torch.uint8),
            f"gallery/{group}/entropy": torch.linspace(0, 2, 12),
            f"gallery/{group}/predicted": torch.arange(12).remainder(10).to(torch.uint8),
            f"gallery/{group}/labels": torch.zeros(12, dtype=torch.uint8),
        }
    rows = [
        {"nll": 0.1 / n, "error": 0.01, "entropy_test": 0.1, "entropy_out_of_domain": 0.5, "auroc": 0.9}
        for n in (1, 2, 4)
    ]
    stage = {"lower": [-0.5, 0.01], "marginal": [-0.4, 0.01], "gap": [0.1, 0.002]}
    header = {
        "kind": "diagnostics",
        "network": "lenet5 seed 0",
        "statistics": {"layers": LAYERS, "num_batches": num_batches, "batch_size": 16},
        "gallery": {
            "method": "Deep Ensembles (3) + SBN",
            "classes": CLASSES,
            "out_of_domain_classes": list("ABCDEFGHIJ"),
        },
        "bound": {"before": stage, "after": stage, "num_examples": 50, "num_samples": 8, "batch_size": 16},
        "by_samples": [{"num_samples": n, **row} for n, row in zip((1, 10, 50), rows, strict=True)],
        "by_batch_size": [{"batch_size": n, **row} for n, row in zip((8, 16, 32), rows, strict=True)],
        "command": "stochbn evaluate lenet5",
        "commit": "abc123",
        "versions": {"stochbn": "0.1"},
    }
    File(header, tensors).write(diagnostics_path(folder))
    return folder


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def unrendered(monkeypatch):
    """Leaves out what takes most of the time, where a test does not look at the figures."""
    monkeypatch.setattr(figures, "render", lambda figure: {"png": b"", "svg": b"<svg/>"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with all there can be, and its report."""
    folder = make_diagnostics(make_files(tmp_path_factory.mktemp("lenet5")))
    write_report(folder, console=quiet())
    return folder


@pytest.fixture(scope="module")
def results(whole):
    return collect(read_files(whole)[0])


@pytest.fixture(scope="module")
def diagnostics(whole):
    return read_files(whole)[1]


def probabilities(file, method, part):
    probs = file.tensors[f"{method}/{part}/log_probs"].double().exp().numpy()
    return probs / probs.sum(1, keepdims=True)


def entropies(probs):
    return -(probs * np.log(probs)).sum(1)


# Numbers


def test_methods_in_the_papers_order(results):
    assert list(results.methods) == METHODS
    assert [len(method.outputs) for method in results.methods.values()] == [3, 3, 1, 1, 2, 2]
    assert [len(method.replicas) for method in results.methods.values()] == [3, 3, 3, 3, 2, 2]


def test_scores_of_one_network_are_means_over_seeds(whole, results):
    files = [File.read(prediction_path(whole, "lenet5", seed)) for seed in range(3)]
    labels = files[0].tensors["labels"].numpy()
    nlls, errors, briers, aurocs, auprs = [], [], [], [], []
    for file in files:
        known, strange = (probabilities(file, "sbn", part) for part in PARTS)
        nlls.append(metrics.log_loss(labels, known, labels=range(10)))
        errors.append(100 * np.mean(known.argmax(1) != labels))
        briers.append(((known - np.eye(10)[labels]) ** 2).sum(1).mean())
        truth = np.r_[np.zeros(len(known)), np.ones(len(strange))]
        uncertainty = np.r_[entropies(known), entropies(strange)]
        aurocs.append(metrics.roc_auc_score(truth, uncertainty))
        auprs.append(metrics.average_precision_score(truth, uncertainty))
    found = score(results)["SBN"]
    columns = {"nll": nlls, "error_percent": errors, "brier": briers, "auroc_entropy": aurocs, "aupr_entropy": auprs}
    for key, values in columns.items():
        assert found[key].value == pytest.approx(np.mean(values)), key
        assert found[key].std == pytest.approx(np.std(values, ddof=1)), key
    assert found["nll"].num_inputs == 400
    assert found["auroc_entropy"].num_inputs == 800


def test_ensemble_is_scored_whole_and_spread_over_those_without_one(whole, results):
    files = [File.read(prediction_path(whole, "lenet5", seed)) for seed in range(3)]
    labels = files[0].tensors["labels"].numpy()
    members = np.stack([probabilities(file, "plain", "test") for file in files])
    found = score(results)["Deep Ensembles"]["nll"]
    assert found.value == pytest.approx(metrics.log_loss(labels, members.mean(0), labels=range(10)))
    without_one = [np.delete(members, i, axis=0).mean(0) for i in range(3)]
    losses = [metrics.log_loss(labels, probs, labels=range(10)) for probs in without_one]
    assert found.std == pytest.approx(np.std(losses, ddof=1))


def test_mutual_information_of_an_ensemble_is_its_members_disagreement(whole, results):
    files = [File.read(prediction_path(whole, "lenet5", seed)) for seed in range(3)]
    members = np.stack([probabilities(file, "plain", "test") for file in files])
    expected = entropies(members.mean(0)) - np.mean([entropies(member) for member in members], axis=0)
    information = results.methods["Deep Ensembles"].outputs[0]["test"].information
    np.testing.assert_allclose(information, expected, atol=2e-3)  # half precision in the file


def test_one_network_has_no_mutual_information(results):
    found = score(results)
    assert "auroc_information" not in found["One network"]
    assert all("auroc_information" in found[name] for name in METHODS[1:])


def test_calibration_error_against_its_definition(results):
    output = results.methods["SBN"].outputs[0]
    confidence, predicted = output["test"].probs.numpy().max(1), output["test"].probs.numpy().argmax(1)
    correct = predicted == results.labels.numpy()
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert measure(output, results.labels)["ece"] == pytest.approx(expected)


@pytest.mark.parametrize("num", [1, 19, 20, 21, 60, 333])
def test_detection_against_the_roc_curve(num):
    random = np.random.default_rng(num)
    known, strange = random.normal(size=50).round(1), random.normal(1, size=num).round(1)  # with ties
    truth = np.r_[np.zeros(50), np.ones(num)]
    false, true, _ = metrics.roc_curve(truth, np.r_[known, strange], drop_intermediate=False)
    assert detect(known, strange)["fpr95"] == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)])
    assert detect(known, strange)["auroc"] == pytest.approx(metrics.auc(false, true))


def test_a_perfect_detector():
    assert detect(np.zeros(5), np.ones(5)) == {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}


@pytest.mark.parametrize(
    ("key", "value", "verdict"),
    [
        ("nll", 0.0251, "within ±"),
        ("nll", 0.0284, "within ±"),
        ("nll", 0.0286, "0.004 higher"),
        ("nll", 0.0160, "0.009 lower"),
        ("error_percent", 0.58, "within ±"),
        ("error_percent", 0.70, "0.17 higher"),
        ("entropy_out_of_domain", 0.034, "the same"),
        ("entropy_out_of_domain", 0.10, "0.07 higher"),
    ],
)
def test_verdict_beside_the_paper(key, value, verdict):
    assert compare("lenet5", {"SBN": {key: Score(value, None, 1)}})["SBN"][key].verdict == verdict


def test_dominance():
    left, right = np.array([0.2, 0.4]), np.array([0.1, 0.5])
    assert dominance(left, left, highest=1.0) == 1.0
    assert dominance(left, right, highest=1.0, num_thresholds=9999) == pytest.approx(0.9, abs=1e-3)  # not in [0.1, 0.2)


def test_claims_follow_the_numbers(results):
    claims = check_claims(results, score(results))
    assert len(claims) == 7
    found = score(results)
    assert claims[0].holds == (found["Deep Ensembles + SBN"]["nll"].value <= found["Deep Ensembles"]["nll"].value)
    pair = ("Dropout", "Dropout + SBN")
    swapped = {new: replace(results.methods[old], name=new) for old, new in (pair, pair[::-1])}
    reverse = replace(results, methods=results.methods | swapped)
    verdicts, opposite = ([claim.holds for claim in check_claims(r, score(r))] for r in (results, reverse))
    assert verdicts[1] is not opposite[1]  # the NLL of Dropout
    assert verdicts[3] is opposite[3]  # its error is on one level, whichever way
    assert (verdicts[5], opposite[5]) == (True, False)  # its ECDF
    numbers = re.search(r"paired difference ([+-][\d.]+)", claims[0].evidence)
    change = found["Deep Ensembles + SBN"]["nll"].value - found["Deep Ensembles"]["nll"].value
    assert float(numbers[1]) == pytest.approx(change, abs=5e-5)


def test_exact_inference_is_compared_on_its_own_inputs(results, diagnostics):
    exact = select_exact(results, diagnostics)
    assert list(exact.methods) == ["One network", "SBN", "Exact (eq. 3)"]
    assert len(exact.labels) == 50
    found = score(exact)
    assert found["Exact (eq. 3)"] == found["SBN"]  # this file's exact predictions are copies of SBN's


# Figures


def test_every_method_has_a_curve(results):
    for part in PARTS:
        axes = figures.draw_ecdf(results, part).axes[0]
        assert [line.get_label() for line in axes.lines] == METHODS
        assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "-", "--", "-", "--"]
        assert all(np.ptp(line.get_ydata()) > 0.9 for line in axes.lines)
    assert len(figures.draw_rejection(results).axes[0].lines) == 6


def test_colours_are_the_methods_everywhere(results):
    drawn = (figures.draw_ecdf(results, "test"), figures.draw_reliability(results), figures.draw_rejection(results))
    colours = {}
    for axes in (axes for figure in drawn for axes in figure.axes):
        for line in axes.lines:
            if line.get_label() in METHODS:
                colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert {name: len(found) for name, found in colours.items()} == dict.fromkeys(METHODS, 1)
    assert colours["Dropout"] == colours["Dropout + SBN"] != colours["Deep Ensembles"]


def test_reliability_diagrams_agree_with_the_calibration_error(results):
    figure = figures.draw_reliability(results)
    assert len(figure.axes) == 6
    assert all(len(axes.lines) == 3 for axes in figure.axes[:3])  # the diagonal, without and with SBN
    method = results.methods["Deep Ensembles"]
    confidence, accuracy, share, count = figures.bin_confidence(method, results)
    assert count.sum() == 400
    assert (share * abs(confidence - accuracy)).sum() == pytest.approx(score(results)["Deep Ensembles"]["ece"].value)


def test_rejection_ends_with_the_most_certain(results):
    output = results.methods["SBN"].outputs[0]["test"]
    kept = figures.accuracy_kept(output, results)
    correct = output.probs.argmax(1).numpy() == results.labels.numpy()
    assert kept[0] == pytest.approx(correct.mean())
    assert kept[-1] == correct[output.entropy.argmin()]
    half = np.argsort(output.entropy)[:200]
    assert kept[200] == pytest.approx(correct[half].mean())


def test_batch_statistics_have_a_panel_for_each_channel(diagnostics):
    figure = diagnostic_figures.draw_statistics(diagnostics, "conv1.norm")
    assert len(figure.axes) == 6
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 1, 2, 2, 1]  # a dead channel is a mark, not a density
    distances = diagnostics.tensors["statistics/conv1.norm/ks"]
    assert figure.axes[1].get_title() == f"channel 9, KS {distances[0, 9]:.3f}"
    assert "constant" in figure.axes[2].get_title()
    for axes in (figure.axes[0], figure.axes[3]):
        for line in axes.lines:  # densities: they cover nearly all of the probability
            assert trapezoid(line.get_ydata(), line.get_xdata()) == pytest.approx(1, abs=0.15)


def test_one_dot_for_each_channel_that_varies(diagnostics):
    axes = diagnostic_figures.draw_distances(diagnostics).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [19] * 6
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv1", "conv2", "fc"]


def test_other_diagnostic_figures(diagnostics):
    header = diagnostics.header
    assert [len(axes.lines) for axes in diagnostic_figures.draw_effect(header["by_samples"], "num_samples").axes] == [
        1,
        2,
        1,
    ]
    assert len(diagnostic_figures.draw_bound(header["bound"]).axes) == 2
    shown = [axes for axes in diagnostic_figures.draw_gallery(diagnostics).axes if axes.images]
    assert len(shown) == 32
    assert shown[1].texts[0].get_text() == "0 → 1\n0.18"


def test_training_has_a_line_for_each_network(whole):
    assert len(figures.draw_training(read_files(whole)[0]).axes[0].lines) == 5


def test_text_is_readable_at_print_size(results, diagnostics, whole):
    for figure in report.draw_all(results, read_files(whole)[0], diagnostics).values():
        texts = [text for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 8
        assert figure.get_figwidth() <= 6.5


def test_saved_figures_are_not_empty(whole):
    names = {path.stem for path in (whole / "figures").glob("*.png")}
    assert names == {path.stem for path in (whole / "figures").glob("*.svg")}
    assert len(names) == 13
    for path in (whole / "figures").glob("*.png"):
        with Image.open(path) as image:
            assert image.width >= 1000
            assert np.asarray(image.convert("L")).std() > 5, path.name


@pytest.mark.usefixtures("unrendered")
def test_figures_of_an_earlier_report_do_not_stay(tmp_path):
    folder = make_diagnostics(make_files(tmp_path, size=60))
    write_report(folder, console=quiet())
    diagnostics_path(folder).unlink()
    (folder / "figures" / "logo.png").write_bytes(b"mine")
    write_report(folder, console=quiet())
    assert not (folder / "figures" / "gallery.png").exists()
    assert (folder / "figures" / "logo.png").read_bytes() == b"mine"
    assert (folder / "figures" / "ecdf-known.png").exists()


# Files


class Tags(HTMLParser):
    """Checks that every tag is closed in order, and keeps images, links and text."""

    def __init__(self):
        super().__init__()
        self.open, self.images, self.targets, self.ids, self.tables, self.words = [], [], [], set(), 0, []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(attrs)
        if tag == "table":
            self.tables += 1
        if "id" in attrs:
            assert attrs["id"] not in self.ids
            self.ids.add(attrs["id"])
        self.targets += [attrs[key] for key in ("href", "src") if key in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parse(page):
    tags = Tags()
    tags.feed(page.read_text("utf-8"))
    tags.close()
    assert tags.open == []
    return tags


def test_page_is_whole_and_needs_nothing_else(whole):
    tags = parse(whole / "report.html")
    assert len(tags.images) == 13
    assert all(
        image["src"].startswith("data:image/svg+xml;base64,") and len(image["alt"]) > 20 for image in tags.images
    )
    assert tags.tables == 5
    links = [target for target in tags.targets if not target.startswith("data:")]
    assert len(links) == 11
    assert all(link.startswith("#") and link[1:] in tags.ids for link in links)
    text = re.sub(r"data:[^\"]*", "", (whole / "report.html").read_text("utf-8"))
    assert "http" not in text
    assert "<script" not in text
    assert "url(" not in text
    words = " ".join(tags.words)
    for expected in (*METHODS, "Exact (eq. 3)", "abc123", "stochbn evaluate lenet5", "0.025 ± 0.003", "LeNet-5, MNIST"):
        assert expected in words


@pytest.mark.usefixtures("unrendered")
def test_page_escapes_what_files_say(tmp_path):
    folder = make_files(tmp_path, num_plain=2, num_dropout=0, size=60, command="<script>alert(1)</script>")
    page = write_report(folder, console=quiet())
    assert "<script" not in page.read_text("utf-8")
    parse(page)


@pytest.mark.usefixtures("unrendered")
def test_tables_in_files_and_terminal(tmp_path):
    folder = make_files(tmp_path, size=100)
    console = quiet()
    assert write_report(folder, console=console) == folder / "report.html"
    found = score(collect(read_files(folder)[0]))
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(map(len, found.values())) == 6 * len(METRICS) - 3
    row = next(row for row in rows if (row["method"], row["metric"]) == ("Deep Ensembles + SBN", "nll"))
    assert float(row["value"]) == pytest.approx(found["Deep Ensembles + SBN"]["nll"].value, rel=1e-5)
    assert (row["n"], row["seeds"], row["paper"]) == ("100", "0 1 2", "0.014")
    assert row["std_over"] == "the 3 ensembles of 2"
    numbers = json.loads((folder / "scores.json").read_text())
    assert numbers["methods"]["Dropout"]["scores"]["nll"]["value"] == pytest.approx(
        found["Dropout"]["nll"].value, rel=1e-5
    )
    assert numbers["provenance"]["seeds"] == {"lenet5": [0, 1, 2], "lenet5-dropout": [0, 1]}
    assert numbers["provenance"]["commit"] == ["abc123"]
    text = (folder / "table.md").read_text()
    assert f"| {found['SBN']['nll'].value:.4f} ± {found['SBN']['nll'].std:.4f} |" in text
    assert "leave one network out" in text
    shown = console.file.getvalue()
    assert all(name in shown for name in METHODS)
    assert "hold" in shown
    assert str(folder) not in shown  # the command says what to open


def test_markdown_keeps_its_columns():
    text = to_markdown(Grid(["a", "b"], [["p(y | x)", "1"]]))
    assert text.splitlines()[-1] == r"| p(y \| x) | 1 |"


def test_same_files_give_the_same_bytes(whole, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(whole / "predictions", again / "predictions")
    write_report(again, console=quiet())
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {path.suffix for path in names} >= {".csv", ".json", ".md", ".png", ".svg", ".html"}
    for name in names:
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name


def test_drawing_leaves_matplotlib_as_it_was(results):
    import matplotlib

    before = dict(matplotlib.rcParams)
    assert isinstance(figures.draw_rejection(results), Figure)
    assert dict(matplotlib.rcParams) == before


# What may be missing or wrong


@pytest.mark.usefixtures("unrendered")
def test_without_diagnostics(tmp_path):
    page = write_report(make_files(tmp_path, size=80), console=quiet())
    tags = parse(page)
    assert len(tags.images) == 5
    assert "diagnostics.safetensors" in " ".join(tags.words)
    assert json.loads((tmp_path / "scores.json").read_text())["diagnostics"] == {}


@pytest.mark.usefixtures("unrendered")
def test_without_out_of_domain(tmp_path):
    page = write_report(make_files(tmp_path, size=80, parts=("test",)), console=quiet())
    tags = parse(page)
    assert len(tags.images) == 4
    assert "no out-of-domain predictions" in " ".join(tags.words)
    claims = json.loads((tmp_path / "scores.json").read_text())["claims"]
    assert [claim["holds"] for claim in claims[4:7]] == [None, None, None]


@pytest.mark.usefixtures("unrendered")
def test_one_seed_has_no_spread_and_no_ensemble(tmp_path):
    folder = make_files(tmp_path, num_plain=1, num_dropout=0, size=80)
    page = write_report(folder, console=quiet())
    results = collect(read_files(folder)[0])
    assert list(results.methods) == ["One network", "SBN"]
    assert all(found.std is None for row in score(results).values() for found in row.values())
    assert "Deep Ensembles need at least two networks" in " ".join(parse(page).words)
    ours = table_1(results, score(results), {})
    assert not any("±" in cell for row in ours.rows for cell in row)


@pytest.mark.usefixtures("unrendered")
def test_dropout_alone(tmp_path):
    folder = make_files(tmp_path, num_plain=0, size=80)
    write_report(folder, console=quiet())
    assert list(collect(read_files(folder)[0]).methods) == ["Dropout", "Dropout + SBN"]


@pytest.mark.usefixtures("unrendered")
def test_an_experiment_that_the_paper_does_not_have(tmp_path):
    folder = make_files(tmp_path, size=80, experiment="digits")
    page = write_report(folder, console=quiet())
    assert ">paper<" not in page.read_text("utf-8")
    assert "paper" not in (folder / "table.md").read_text().splitlines()[0]


@pytest.mark.usefixtures("unrendered")
def test_options_of_training_are_told(tmp_path):
    folder = make_files(tmp_path, size=80, options="--optimizer sgd")
    write_report(folder, console=quiet())
    assert "trained with --optimizer sgd in place of the experiment's own" in (folder / "table.md").read_text()


def test_no_prediction_files(tmp_path):
    with pytest.raises(DataError, match=r"Expected prediction files in .*, got none. Run `stochbn evaluate lenet5`"):
        write_report(tmp_path / "lenet5", console=quiet())
    assert not (tmp_path / "lenet5").exists()


def test_files_of_two_experiments(tmp_path):
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20)
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20, experiment="digits")
    with pytest.raises(DataError, match="files of one experiment, got experiment digits and lenet5"):
        write_report(tmp_path, console=quiet())


def test_files_of_two_settings_or_test_sets(tmp_path):
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20)
    other = make_files(tmp_path / "other", num_plain=2, num_dropout=0, size=20, num_samples=9)
    source, target = (prediction_path(folder, "lenet5", 1) for folder in (other, tmp_path))
    shutil.copy(source, target)
    with pytest.raises(DataError, match="got num_samples 8 and 9"):
        write_report(tmp_path, console=quiet())
    make_files(other, num_plain=2, num_dropout=0, size=30)
    shutil.copy(source, target)
    with pytest.raises(DataError, match="different labels"):
        write_report(tmp_path, console=quiet())


def test_a_damaged_file(tmp_path):
    make_files(tmp_path, num_plain=2, num_dropout=0, size=20)
    path = prediction_path(tmp_path, "lenet5", 1)
    file = File.read(path)
    del file.tensors["sbn/test/expected_entropy"]
    file.write(path)
    with pytest.raises(DataError, match="Expected 'sbn/test/expected_entropy' in every prediction file"):
        write_report(tmp_path, console=quiet())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="Evaluate again"):
        write_report(tmp_path, console=quiet())


def test_certain_predictions_give_finite_scores():
    probs = torch.eye(3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure({part: Output(probs, torch.zeros(3)) for part in PARTS}, torch.tensor([0, 1, 1]))
    assert all(math.isfinite(value) for value in found.values())


# The browser


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_page_in_a_browser(whole, tmp_path):
    """Opens a copy of the page with a script that counts what was loaded and reports it through the title."""
    script = (
        "<script>addEventListener('load', () => { const images = [...document.images]; document.title = "
        "`${images.filter(i => i.complete && i.naturalWidth > 100).length} of ${images.length} images, ` + "
        "`${document.querySelectorAll('#table tbody tr').length} rows, ` + "
        "`${document.documentElement.scrollWidth <= innerWidth ? 'fits' : 'too wide'}`; });</script>"
    )
    page = tmp_path / "page.html"
    page.write_text((whole / "report.html").read_text("utf-8").replace("</body>", f"{script}</body>"), "utf-8")
    for width in (1280, 400):
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"),
                *("--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        title = re.search("<title>(.*?)</title>", done.stdout)[1]
        assert title == "13 of 13 images, 6 rows, fits"
        assert "CONSOLE" not in done.stderr


def test_rows_of_the_paper_are_checked_against_the_limits_of_the_reproduction():
    def row(error_percent, nll):
        return {"error_percent": Score(error_percent, None, 9), "nll": Score(nll, None, 9)}

    for ours, expected in ((row(0.67, 0.028), [True, True]), (row(0.70, 0.0291), [False, False])):
        scores = {"SBN": ours}
        assert [claim.holds for claim in check_reproduction(scores, compare("lenet5", scores))] == expected
