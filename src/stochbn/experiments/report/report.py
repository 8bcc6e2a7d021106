"""Prediction files → tables, figures and one page. Nothing is computed again that needs a network.

    write_report(Path("results/lenet5"))

writes `table.md`, `table.csv`, `scores.json`, `figures/` and `report.html` beside `predictions/`. The same files give
the same bytes.
"""

import base64
import json
from dataclasses import asdict, replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from rich.console import Console

from stochbn.experiments.data.sources import DataError, write_atomically
from stochbn.experiments.files import File, diagnostics_path
from stochbn.experiments.report import diagnostic_figures, figures
from stochbn.experiments.report.claims import check_claims, check_reproduction
from stochbn.experiments.report.paper import Papers, compare
from stochbn.experiments.report.scores import METRICS, Method, Results, Score, collect, score, select_exact
from stochbn.experiments.report.tables import (
    appendix_tables,
    claims_table,
    print_tables,
    rounded,
    table_1,
    table_2,
    to_csv,
    to_markdown,
)
from stochbn.experiments.training.recipes import EXPERIMENTS

_FIGURES = {
    *("ecdf-out-of-domain", "ecdf-known", "reliability", "rejection", "training"),
    *("samples", "batch-size", "ks", "bound", "gallery"),
}
_NAMES = {
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "resnet18": "ResNet-18",
    "mnist": "MNIST",
    "notmnist": "notMNIST",
    "cifar5": "CIFAR5",
    "digits": "Digits",
}


def write_report(folder: Path, *, console: Console | None = None) -> Path:
    """Writes tables, figures and the page from the prediction files of a folder; replaces those of an earlier report.

    Args:
        folder: Holds `predictions/`, as `stochbn evaluate` writes it.
        console: Where the table goes; standard output by default.

    Returns:
        The path of the page.

    Raises:
        DataError: There are no prediction files, or they do not belong together.
    """
    console = console or Console()
    files, diagnostics = read_files(folder)
    results = collect(files)
    scores = score(results)
    papers = compare(results.header["experiment"], scores)
    claims = [*check_claims(results, scores), *check_reproduction(scores, papers)]
    exact = select_exact(results, diagnostics) if diagnostics else None
    exact_scores = score(exact) if exact else {}
    provenance, measured = _describe_provenance(files, results), _summarise(diagnostics)
    numbers = {
        "experiment": results.header["experiment"],
        "provenance": provenance,
        "metrics": {metric.key: metric.meaning for metric in METRICS},
        "methods": {name: _describe(method, scores[name], papers) for name, method in results.methods.items()},
        "claims": [asdict(claim) for claim in claims],
        "exact": {name: {key: asdict(found) for key, found in row.items()} for name, row in exact_scores.items()},
        "diagnostics": measured,
    }
    first, second, third = table_1(results, scores, papers), table_2(scores), claims_table(claims)
    notes = _describe_notes(results, bool(papers))
    appendices = [*([replace(table_2(exact_scores), best=frozenset())] if exact else []), *appendix_tables(measured)]
    images = _write_figures(folder / "figures", draw_all(results, files, diagnostics))
    text = {
        "scores.json": json.dumps(rounded(numbers), indent=1, ensure_ascii=False) + "\n",
        "table.csv": to_csv(results, scores, papers),
        "table.md": "\n\n".join([*map(to_markdown, (first, second, third, *appendices)), *notes]) + "\n",
        "report.html": _render_page(
            title=_describe_title(results),
            header=results.header,
            first=first,
            second=second,
            exact=replace(table_2(exact_scores), best=frozenset()),
            num_exact=len(exact.labels) if exact else 0,
            claims=third,
            num_held=sum(claim.holds is True for claim in claims),
            num_checked=sum(claim.holds is not None for claim in claims),
            notes=notes,
            metrics=METRICS,
            images=images,
            has_paper=bool(papers),
            measured=measured,
            provenance=provenance,
        ),
    }
    for name, content in text.items():
        write_atomically(folder / name, content.encode())
    print_tables(console, _describe_title(results), scores, papers, claims, appendix_tables(measured))
    return folder / "report.html"


def read_files(folder: Path) -> tuple[list[File], File | None]:
    """Reads a folder's prediction files, by recipe and seed, and its diagnostics where there are any.

    Raises:
        DataError: There are no prediction files, or one is not what it should be.
    """
    last = diagnostics_path(folder)
    paths = sorted(path for path in last.parent.glob("*.safetensors") if path != last)
    files = [file for file in map(File.read, paths) if file.header.get("kind") == "predictions"]
    if not files:
        name = folder.name if folder.name in EXPERIMENTS else "EXPERIMENT"
        raise DataError(f"Expected prediction files in {last.parent}, got none. Run `stochbn evaluate {name}` first.")
    files.sort(key=lambda file: (file.header["recipe"], file.header["seed"]))
    return files, File.read(last) if last.exists() else None


def draw_all(results: Results, files: list[File], diagnostics: File | None) -> dict[str, Figure]:
    """Draws every figure that the files allow, by name."""
    drawn = {}
    if results.has_out_of_domain:
        drawn["ecdf-out-of-domain"] = figures.draw_ecdf(results, "out-of-domain")
    drawn["ecdf-known"] = figures.draw_ecdf(results, "test")
    drawn["reliability"] = figures.draw_reliability(results)
    drawn["rejection"] = figures.draw_rejection(results)
    drawn["training"] = figures.draw_training(files)
    header = diagnostics.header if diagnostics else {}
    if diagnostics and "by_samples" in header:
        drawn["samples"] = diagnostic_figures.draw_effect(header["by_samples"], "num_samples")
    if diagnostics and "by_batch_size" in header:
        drawn["batch-size"] = diagnostic_figures.draw_effect(header["by_batch_size"], "batch_size")
    if diagnostics and "statistics" in header:
        for layer in _shown_layers(header["statistics"]["layers"]):
            name = f"statistics-{diagnostic_figures.short_name(layer)}"
            drawn[name] = diagnostic_figures.draw_statistics(diagnostics, layer)
        drawn["ks"] = diagnostic_figures.draw_distances(diagnostics)
    if diagnostics and "bound" in header:
        drawn["bound"] = diagnostic_figures.draw_bound(header["bound"])
    if diagnostics and "gallery" in header:
        drawn["gallery"] = diagnostic_figures.draw_gallery(diagnostics)
    return drawn


def _summarise(diagnostics: File | None) -> dict[str, Any]:
    """Returns the numbers of the diagnostics, the distances of a layer's channels as median, maximum and count."""
    if diagnostics is None:
        return {}
    kept = [
        *("network", "command", "commit", "versions", "bound", "by_samples", "by_batch_size", "num_curve"),
        *("statistics", "gallery"),
    ]
    numbers = {key: diagnostics.header[key] for key in kept if key in diagnostics.header}
    if "statistics" in numbers:
        distances = {}
        for layer in numbers["statistics"]["layers"]:
            both = diagnostics.tensors[f"statistics/{layer}/ks"]  # (2, C)
            finite = [row[~row.isnan()] for row in both]
            distances[layer] = {
                symbol: {"median": row.quantile(0.5).item(), "max": row.max().item(), "num_channels": len(row)}
                for symbol, row in zip(("mean", "log variance"), finite, strict=True)
                if len(row)
            }
        numbers["statistics"] = {**numbers["statistics"], "ks": distances}
    return numbers


def _describe_provenance(files: list[File], results: Results) -> dict[str, Any]:
    """Returns by what the numbers were made: commands, commits, versions, seeds, counts."""
    headers = [file.header for file in files]
    first = next(iter(results.methods.values())).outputs[0]
    seeds: dict[str, list[int]] = {}
    for header in headers:
        seeds.setdefault(header["recipe"], []).append(header["seed"])
    return {
        "command": sorted({header["command"] for header in headers}),
        "commit": sorted({header["commit"] for header in headers}),
        "versions": sorted({", ".join(f"{k} {v}" for k, v in header["versions"].items()) for header in headers}),
        "seeds": seeds,
        "epochs": {header["recipe"]: header["epochs"] for header in headers},
        "batch_size": {header["recipe"]: header["batch_size"] for header in headers},
        "num_samples": results.header["num_samples"],
        "draw_seed": results.header["draw_seed"],
        "num_test": len(results.labels),
        "num_out_of_domain": len(first["out-of-domain"].probs) if results.has_out_of_domain else 0,
        "train_hours": round(sum(header["train_seconds"] for header in headers) / 3600, 2),
    }


def _describe_notes(results: Results, has_paper: bool) -> list[str]:
    """Returns what a reader of the tables must know."""
    notes = []
    if any(len(method.outputs) > 1 for method in results.methods.values()):
        notes.append(
            "One network, SBN, Dropout and Dropout + SBN: the mean over networks trained from different seeds, scored "
            "one by one, ± the standard deviation over these seeds."
        )
    if any("uned SBN" in name for name in results.methods):
        notes.append("Tuned SBN: its spread was chosen for each network by the NLL on validation data.")
    ensemble = results.methods.get("Deep Ensembles")
    if ensemble:
        note = f"Deep Ensembles: the ensemble of all {len(ensemble.seeds)} networks"
        if ensemble.spread:
            note += (
                f", ± the standard deviation over {ensemble.spread} that leave one network out. Those share members, "
                "so this ± understates how ensembles trained apart differ"
            )
        notes.append(note + ".")
    else:
        notes.append("Deep Ensembles need at least two networks without dropout; there are fewer.")
    if has_paper:
        notes.append(
            "“Within ±” compares with the paper's ±, and half a unit of its last digit for rounding. The paper prints "
            "no number for one plain network. Its median entropies are read off its plots, to about 0.02."
        )
    if "options" in results.header:
        notes.append(f"The networks were trained with {results.header['options']} in place of the experiment's own.")
    expected = EXPERIMENTS.get(results.header["experiment"])
    for name, wanted in (
        ("One network", expected and expected.num_seeds),
        ("Dropout", expected and expected.num_dropout_seeds),
    ):
        found = len(results.methods[name].seeds) if name in results.methods else 0
        if wanted and found < wanted:
            notes.append(f"Not finished: {name} has {found} of the {wanted} networks of this experiment.")
    if not results.has_out_of_domain:
        notes.append("The files hold no out-of-domain predictions, so all that needs them is left out.")
    return notes


def _describe_title(results: Results) -> str:
    """Returns the networks and the data, as a title."""
    header = results.header
    network = _NAMES.get(header["experiment"], header["experiment"])
    data, other = (_NAMES.get(header[key], header[key]) for key in ("data", "out_of_domain"))
    known = network if data == network else f"{network}, {data}"
    if not results.has_out_of_domain:
        return known
    return f"{known} against {'its hidden classes' if other == data else other}"


def _render_page(**content: Any) -> str:
    """Renders the page, which needs nothing outside itself."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = package_files("stochbn.experiments.report").joinpath("report.html.j2").read_text("utf-8")
    return environment.from_string(template).render(**content) + "\n"


def _write_figures(folder: Path, drawn: dict[str, Figure]) -> dict[str, str]:
    """Writes each figure as PNG and SVG, removes those of an earlier report, and returns the SVGs as data URIs."""
    images, written = {}, set()
    for name, figure in drawn.items():
        for kind, content in figures.render(figure).items():
            write_atomically(folder / f"{name}.{kind}", content)
            written.add(f"{name}.{kind}")
            if kind == "svg":
                images[name] = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    for path in folder.iterdir():
        ours = path.stem in _FIGURES or path.stem.startswith("statistics-")
        if ours and path.suffix in (".png", ".svg") and path.name not in written:
            path.unlink()
    return images


def _describe(method: Method, scores: dict[str, Score], papers: Papers) -> dict[str, Any]:
    theirs = papers.get(method.name, {})
    return {
        "seeds": method.seeds,
        "std_over": method.spread if len(method.replicas) > 1 else None,
        "scores": {key: asdict(found) for key, found in scores.items()},
        "paper": {key: asdict(found) for key, found in theirs.items()},
    }


def _shown_layers(layers: list[str]) -> list[str]:
    """Returns up to three layers: the first, the middle and the last."""
    return [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})] if layers else []
