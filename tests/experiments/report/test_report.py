import csv
import json
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mutations import mutate
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import File, diagnostics_path, prediction_path
from stochbn.experiments.report import differences, report
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.report import compare_recommended, draw_all, read_files, write_report
from stochbn.experiments.report.scores import METRICS, score

LABELS = ["One network", "SBN", "Deep Ensembles", "Deep Ensembles + SBN", "Dropout", "Dropout + SBN"]
NUM_FIGURES = 11  # with two layers


@pytest.fixture
def undrawn(monkeypatch, unrendered):
    """Leaves figures out, where a test does not look at them."""
    monkeypatch.setattr(report, "draw_all", lambda *_: {"training": Figure()})


def test_text_is_readable_at_print_size(results, diagnostics, whole):
    for figure in draw_all(results, read_files(whole)[0], diagnostics).values():
        texts = [text for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize")) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 8
        assert figure.get_figwidth() <= 6.5


def test_saved_figures_are_not_empty(whole):
    names = {path.stem for path in (whole / "figures").glob("*.png")}
    assert names == {path.stem for path in (whole / "figures").glob("*.svg")}
    assert len(names) == NUM_FIGURES
    for path in (whole / "figures").glob("*.png"):
        with Image.open(path) as image:
            assert image.width >= 1000
            assert np.asarray(image.convert("L")).std() > 5, path.name


@pytest.mark.usefixtures("unrendered")
def test_figures_of_an_earlier_report_do_not_stay(make_files, tmp_path, quiet, monkeypatch):
    folder = make_files(tmp_path, size=60)
    drawn = ["gallery", "statistics-conv1", "ecdf-known"]
    monkeypatch.setattr(report, "draw_all", lambda *_: {name: Figure() for name in drawn})
    write_report(folder, console=quiet)
    assert (folder / "figures" / "gallery.png").exists()
    (folder / "figures" / "logo.png").write_bytes(b"mine")
    drawn[:2] = []
    write_report(folder, console=quiet)
    assert sorted(path.name for path in (folder / "figures").iterdir()) == [
        *("ecdf-known.png", "ecdf-known.svg", "logo.png")
    ]
    assert (folder / "figures" / "logo.png").read_bytes() == b"mine"


def test_the_first_the_middle_and_the_last_layer_are_shown():
    assert report._shown_layers(["a", "b", "c", "d", "e"]) == ["a", "c", "e"]
    assert report._shown_layers(["a", "b"]) == ["a", "b"]
    assert report._shown_layers([]) == []


# Files


def test_page_is_whole_and_needs_nothing_else(whole, parse):
    tags = parse(whole / "report.html")
    assert len(tags.images) == NUM_FIGURES
    assert all(
        image["src"].startswith("data:image/svg+xml;base64,") and len(image["alt"]) > 20 for image in tags.images
    )
    assert tags.tables == 6
    links = [target for target in tags.targets if not target.startswith("data:")]
    assert len(links) == 11
    assert all(link.startswith("#") and link[1:] in tags.ids for link in links)
    text = re.sub(r"data:[^\"]*", "", (whole / "report.html").read_text("utf-8"))
    assert "http" not in text
    assert "<script" not in text
    assert "url(" not in text
    words = " ".join(tags.words)
    for expected in (*LABELS, "Exact (eq. 3)", "abc123", "stochbn evaluate lenet5", "0.025 ± 0.003", "LeNet-5, MNIST"):
        assert expected in words


@pytest.mark.usefixtures("undrawn")
def test_page_escapes_what_files_say(make_files, tmp_path, quiet, parse):
    folder = make_files(tmp_path, num_plain=2, num_dropout=0, size=60, command="<script>alert(1)</script>")
    page = write_report(folder, console=quiet)
    assert "<script" not in page.read_text("utf-8")
    parse(page)


@pytest.mark.usefixtures("undrawn")
def test_tables_in_files_and_terminal(make_files, tmp_path, quiet):
    folder = make_files(tmp_path, size=100)
    assert write_report(folder, console=quiet) == folder / "report.html"
    found = score(collect(read_files(folder)[0]))
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(map(len, found.values())) == 6 * len(METRICS) - 3
    row = next(row for row in rows if (row["method"], row["metric"]) == ("ensemble+sbn", "nll"))
    assert float(row["value"]) == pytest.approx(found["ensemble+sbn"]["nll"].value, rel=1e-5)
    assert (row["n"], row["seeds"], row["paper"]) == ("100", "0 1 2", "0.014")
    assert row["std_over"] == "the 3 ensembles of 2"
    numbers = json.loads((folder / "scores.json").read_text())
    assert numbers["methods"]["dropout"]["label"] == "Dropout"
    assert numbers["methods"]["dropout"]["scores"]["nll"]["value"] == pytest.approx(
        found["dropout"]["nll"].value, rel=1e-5
    )
    assert numbers["provenance"]["seeds"] == {"lenet5": [0, 1, 2], "lenet5-dropout": [0, 1]}
    assert numbers["provenance"]["commit"] == ["abc123"]
    text = (folder / "table.md").read_text()
    assert f"| {found['sbn']['nll'].value:.4f} ± {found['sbn']['nll'].std:.4f} |" in text
    assert "leave one network out" in text
    shown = quiet.file.getvalue()
    assert all(label in shown for label in LABELS)
    assert "hold" in shown
    assert str(folder) not in shown  # the command says what to open


def test_same_files_give_the_same_bytes(whole, tmp_path, quiet):
    again = tmp_path / "again"
    shutil.copytree(whole / "predictions", again / "predictions")
    write_report(again, console=quiet)
    names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {path.suffix for path in names} >= {".csv", ".json", ".md", ".png", ".svg", ".html"}
    for name in names:
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name


# One network against several


@pytest.mark.usefixtures("undrawn")
def test_differences_are_reported_where_the_rows_are(cifar5, tmp_path, quiet, parse, monkeypatch):
    monkeypatch.setattr(differences.compare, "__defaults__", (20,))  # resamples
    shutil.copytree(cifar5 / "predictions", tmp_path / "predictions")
    page = write_report(tmp_path, console=quiet)
    numbers = json.loads((tmp_path / "scores.json").read_text())
    pairs = [(found["first"], found["second"]) for found in numbers["differences"]]
    assert pairs == [*(("last-tuned", "ensemble"), ("last-tuned", "plain+temperature"), ("ensemble+last", "ensemble"))]
    for found in numbers["differences"]:
        for key, interval in found["scores"].items():
            ours, theirs = (numbers["methods"][found[name]]["scores"][key]["value"] for name in ("first", "second"))
            assert interval["difference"] == pytest.approx(ours - theirs, abs=1e-5 * (abs(ours) + abs(theirs)))
    assert {"nll", "ece", "brier", "auroc_entropy", "aupr_entropy", "fpr95_entropy"} < found["scores"].keys()
    words = " ".join(parse(page).words)
    assert "Last layer, tuned − Deep Ensembles (3 of 6 networks)" in words
    assert "VGG-11, CIFAR5 against its hidden classes" in words
    assert "Last layer, tuned − One network + temperature" in (tmp_path / "table.md").read_text()
    assert numbers["methods"]["last-tuned"]["chosen"]


def test_methods_of_other_networks_are_not_compared(make_files, tmp_path):
    folder = make_files(tmp_path, num_plain=3, num_dropout=0, size=60, spreads=True)
    path = folder / "predictions" / "lenet5-seed2.safetensors"
    file = File.read(path)
    File(file.header, {name: t for name, t in file.tensors.items() if "last@" not in name}).write(path)
    assert compare_recommended(collect(read_files(folder)[0])) == []


# What may be missing or wrong


@pytest.mark.usefixtures("unrendered")
def test_without_diagnostics(make_files, tmp_path, quiet, parse):
    page = write_report(make_files(tmp_path, size=80), console=quiet)
    tags = parse(page)
    assert len(tags.images) == 5
    assert "diagnostics.safetensors" in " ".join(tags.words)
    assert json.loads((tmp_path / "scores.json").read_text())["diagnostics"] == {}


@pytest.mark.usefixtures("unrendered")
def test_the_effect_of_the_mini_batch_size_alone(make_files, make_diagnostics, tmp_path, quiet, parse):
    """Of the diagnostics CIFAR5 has only that."""
    path = diagnostics_path(make_diagnostics(make_files(tmp_path, size=80)))
    file = File.read(path)
    kept = {key: value for key, value in file.header.items() if key in ("kind", "network", "commit", "by_batch_size")}
    File(kept, {"labels": file.tensors["labels"]}).write(path)
    tags = parse(write_report(tmp_path, console=quiet))
    assert len(tags.images) == 6
    assert "figure-batch-size" in tags.ids
    assert not {"statistics", "bound", "gallery", "exact"} & tags.ids


@pytest.mark.usefixtures("unrendered")
def test_without_out_of_domain(make_files, tmp_path, quiet, parse):
    page = write_report(make_files(tmp_path, size=80, parts=("test",)), console=quiet)
    tags = parse(page)
    assert len(tags.images) == 4
    assert "no out-of-domain predictions" in " ".join(tags.words)
    claims = json.loads((tmp_path / "scores.json").read_text())["claims"]
    assert [claim["holds"] for claim in claims[6:10]] == [None] * 4


@pytest.mark.usefixtures("undrawn")
def test_one_network_alone(make_files, tmp_path, quiet, parse):
    page = write_report(make_files(tmp_path, num_plain=1, num_dropout=0, size=80), console=quiet)
    assert "Deep Ensembles need at least two networks" in " ".join(parse(page).words)


@pytest.mark.usefixtures("undrawn")
def test_an_experiment_that_the_paper_does_not_have(make_files, tmp_path, quiet):
    folder = make_files(tmp_path, size=80, experiment="digits")
    page = write_report(folder, console=quiet)
    assert ">paper<" not in page.read_text("utf-8")
    assert "paper" not in (folder / "table.md").read_text().splitlines()[0]


def test_no_prediction_files(tmp_path, quiet):
    with pytest.raises(DataError, match=r"Expected prediction files in .*, got none. Run `stochbn evaluate lenet5`"):
        write_report(tmp_path / "lenet5", console=quiet)
    assert not (tmp_path / "lenet5").exists()


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
        assert title == f"{NUM_FIGURES} of {NUM_FIGURES} images, 6 rows, fits"
        assert "CONSOLE" not in done.stderr


# What a file may say


def rewrite(path: Path, header: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
    file = File.read(path)
    tensors = {
        next((name.replace(old, new) for old, new in (renamed or {}).items() if old in name), name): tensor
        for name, tensor in file.tensors.items()
    }
    File(file.header | header, tensors).write(path)


@pytest.mark.parametrize("layer", ["/../../../../escaped/pwned", "../up.norm", "..", "a/b", "x" * 3000, "µ\\:*?"])
@pytest.mark.usefixtures("unrendered")
def test_a_layer_s_name_never_leads_out_of_the_folder(make_files, make_diagnostics, tmp_path, quiet, parse, layer):
    folder = make_diagnostics(make_files(tmp_path / "deep" / "down" / "in" / "results", size=60))
    path = diagnostics_path(folder)
    statistics = File.read(path).header["statistics"] | {"layers": [layer, "fc.norm"]}
    rewrite(path, {"statistics": statistics}, {"/conv1.norm/": f"/{layer}/"})
    tags = parse(write_report(folder, console=quiet))
    found = {path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.is_file()}
    assert {parts[:4] for parts in found} == {("deep", "down", "in", "results")}
    assert {len(parts) for parts in found} == {5, 6}
    names = {path.name for path in (folder / "figures").iterdir()}
    assert len([name for name in names if name.startswith("statistics-") and name.endswith(".png")]) == 2
    assert len([image for image in tags.images if "channels of" in image["alt"]]) == 2


@pytest.mark.parametrize("name", ["table.md", "figures", "figures/training.png"])
@pytest.mark.usefixtures("unrendered")
def test_no_link_leads_out_of_the_folder(make_files, tmp_path, quiet, name):
    folder, elsewhere = make_files(tmp_path / "results", num_plain=1, num_dropout=0, size=60), tmp_path / "elsewhere"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(elsewhere)
    if name == "figures":
        elsewhere.mkdir()
    with pytest.raises(
        DataError, match=r"^Expected to write into .*, got .*, a link to .*elsewhere.*\. Remove the link"
    ):
        write_report(folder, console=quiet)
    assert not elsewhere.exists() or not list(elsewhere.iterdir())
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be reached by one
    (folder / name).unlink()
    assert write_report(tmp_path / "link", console=quiet).exists()


@pytest.mark.usefixtures("unrendered")
def test_names_are_shown_as_they_are(make_files, make_diagnostics, tmp_path, quiet, parse):
    hostile = "[/] [bold]x[/bold] <script>alert(1)</script> | [a](javascript:b) `c` &lt;"
    folder = make_diagnostics(make_files(tmp_path, size=60))
    for path in (folder / "predictions").iterdir():
        rewrite(path, {"experiment": hostile, "options": hostile, "recipe": hostile})
    path = diagnostics_path(folder)
    statistics = File.read(path).header["statistics"] | {"layers": [hostile, "fc.norm"]}
    rewrite(path, {"statistics": statistics}, {"/conv1.norm/": f"/{hostile}/"})
    page = write_report(folder, console=quiet)
    assert hostile in " ".join(parse(page).words)
    assert "<script" not in page.read_text("utf-8")
    assert hostile in quiet.file.getvalue()  # its markup is none
    markdown = (folder / "table.md").read_text("utf-8")
    assert "<script" not in markdown
    assert markdown.count(r"&lt;script>alert(1)&lt;/script> \| \[a\](javascript:b) \`c\` &amp;lt;") >= 2


@pytest.mark.usefixtures("unrendered")
def test_mutated_folders_are_reported_or_refused_in_a_sentence(
    make_files, make_diagnostics, tmp_path, quiet, monkeypatch
):
    monkeypatch.setattr(differences.compare, "__defaults__", (5,))  # resamples
    sizes: dict[str, Any] = {"num_plain": 2, "num_dropout": 1, "size": 60}
    sound = [make_diagnostics(make_files(tmp_path / "a", **sizes)), make_files(tmp_path / "b", spreads=True, **sizes)]
    rng = random.Random(0)
    for number in range(60):
        folder = tmp_path / str(number)
        shutil.copytree(sound[number % 4 == 3] / "predictions", folder / "predictions")
        path = rng.choice(sorted((folder / "predictions").iterdir()))
        path.write_bytes(mutate(path.read_bytes(), "stochbn", rng))
        try:
            write_report(folder, console=quiet)
        except DataError as error:
            message = str(error)
            assert message.startswith("Expected ")
            assert str(folder) in message
            assert re.search(r"(Evaluate again|Remove one|or evaluate again)\.$", message)
            assert message.isprintable()


def test_two_files_of_one_network(make_files, tmp_path, quiet):
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20)
    path = prediction_path(tmp_path, "lenet5", 0)
    shutil.copy(path, path.with_name("copy.safetensors"))
    with pytest.raises(DataError, match=r"got two of one: .*copy\.safetensors and .*seed0\.safetensors\. Remove one\."):
        write_report(tmp_path, console=quiet)


def test_what_no_check_foresaw_names_the_files(make_files, make_diagnostics, tmp_path, quiet, monkeypatch):
    folder = make_diagnostics(make_files(tmp_path, size=60))

    def fail(*_: object) -> None:
        raise KeyError("nobody")

    for name, where in (("summarise", r"diagnostics\.safetensors"), ("describe_title", "predictions")):
        with monkeypatch.context() as patch:
            patch.setattr(report, name, fail)
            with pytest.raises(DataError, match=rf"report .*{where}, got .* \(KeyError: 'nobody'\)\. Evaluate again"):
                write_report(folder, console=quiet)
