"""Prediction files → tables, figures and one page. Nothing is computed again that needs a network.

    write_report(Path("results/lenet5"))

writes `table.md`, `table.csv`, `scores.json`, `figures/` and `report.html` beside `predictions/`. The same files give
the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib.figure import Figure
from rich.console import Console

from stochbn.distributions.storage import brief
from stochbn.experiments.data.sources import DataError, write_atomically
from stochbn.experiments.files import File, diagnostics_path
from stochbn.experiments.report import diagnostic_figures, figures, tables
from stochbn.experiments.report.collect import collect, select_exact
from stochbn.experiments.report.differences import Difference, compare
from stochbn.experiments.report.notes import (
    describe_findings,
    describe_notes,
    describe_provenance,
    describe_title,
    summarise,
)
from stochbn.experiments.report.paper import Papers, check_claims, check_reproduction, set_beside
from stochbn.experiments.report.scores import METRICS, Results, Scores, score
from stochbn.experiments.training.recipes import EXPERIMENTS
from stochbn.pages.figures import render
from stochbn.pages.page import Grid, embed, render_page

_FIGURES = {
    *("ecdf-out-of-domain", "ecdf-known", "reliability", "rejection", "training"),
    *("samples", "batch-size", "ks", "gallery"),
    "bound",  # which earlier reports had
}


def write_report(folder: Path, *, console: Console | None = None) -> Path:
    """Writes tables, figures and the page from the prediction files of a folder; replaces those of an earlier report.

    The files lie in `predictions/`, as `stochbn evaluate` writes them. Prints the table, and returns the page's path.

    Raises:
        DataError: There are no prediction files, or they do not belong together.
    """
    console = console or Console()
    files, diagnostics = read_files(folder)
    with _blaming(folder / "predictions"):
        return _write_report(folder, files, diagnostics, console)


def _write_report(folder: Path, files: list[File], diagnostics: File | None, console: Console) -> Path:
    results = collect(files)
    experiment, title = results.header["experiment"], describe_title(results)
    scores = score(results)
    papers = set_beside(experiment, scores)
    claims = [*check_claims(results, scores), *check_reproduction(experiment, scores, papers)]
    with _blaming(diagnostics_path(folder)):
        exact = select_exact(results, diagnostics) if diagnostics else None
        exact_scores, measured = score(exact) if exact else {}, summarise(diagnostics)
    differences, labels = compare_recommended(results), {key: scored.label for key, scored in results.methods.items()}
    provenance = describe_provenance(files, results)
    numbers = {
        "experiment": experiment,
        "provenance": provenance,
        "metrics": {metric.key: metric.meaning for metric in METRICS},
        "methods": _describe_methods(results, scores, papers),
        "claims": [asdict(claim) for claim in claims],
        "differences": [asdict(difference) for difference in differences],
        "exact": {key: {name: asdict(found) for name, found in row.items()} for key, row in exact_scores.items()},
        "diagnostics": measured,
    }
    grids = {
        "first": tables.table_1(results, scores, papers),
        "second": tables.table_2(results, scores),
        "claims": tables.claims_table(claims),
        "differences": tables.differences_table(differences, labels).transposed(),
        "exact": tables.table_2(exact, exact_scores, marks_best=False) if exact else Grid([], []),
        "training": tables.training_table(files, results),
    }
    notes, appendices = describe_notes(results, has_paper=bool(papers)), tables.appendix_tables(measured)
    shown = [grid for grid in (*grids.values(), *appendices) if grid.rows]
    # On the page methods are rows, and what is of known data stands apart: a table fits a screen.
    grids["second"] = tables.table_2(results, scores, of="test").transposed()
    detection = tables.table_2(results, scores, of="out-of-domain")
    grids["detection"] = detection.transposed() if detection.rows else detection
    grids["bound"] = next((grid for grid in appendices if grid.header[0].startswith("Appendix A")), Grid([], []))
    page = render_page(
        "stochbn.experiments.report",
        "report.html.j2",
        **grids,
        title=title,
        header=results.header,
        num_exact=len(exact.labels) if exact else 0,
        findings=describe_findings(results, scores, claims),
        notes=notes,
        metrics=METRICS,
        images=_write_figures(folder, draw_all(results, files, diagnostics)),
        has_paper=bool(papers),
        measured=measured,
        provenance=provenance,
    )
    text = {
        "scores.json": json.dumps(tables.rounded(numbers), indent=1, ensure_ascii=False) + "\n",
        "table.csv": tables.to_csv(results, scores, papers),
        "table.md": "\n\n".join([*map(tables.to_markdown, shown), *map(tables.escape, notes)]) + "\n",
        "report.html": page,
    }
    for name, content in text.items():
        _write(folder, name, content.encode())
    tables.print_tables(console, title, results, scores, papers, claims)
    for grid in appendices:
        tables.print_grid(console, grid)
    return folder / "report.html"


def compare_recommended(results: Results) -> list[Difference]:
    """Compares what the guide recommends for one network with several networks, and with a temperature alone.

    Only methods that were scored on the same networks are compared.
    """
    methods = results.methods
    one = "last-tuned" if "last-tuned" in methods else "last"
    pairs = ((one, "ensemble"), (one, "plain+temperature"), ("ensemble+last", "ensemble"))
    return [
        difference
        for first, second in pairs
        if first in methods and second in methods and methods[first].seeds == methods[second].seeds
        for difference in compare(methods, results.labels, [(first, second)])
    ]


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
    drawn = {"ecdf-out-of-domain": figures.draw_ecdf(results, "out-of-domain")} if results.has_out_of_domain else {}
    drawn["ecdf-known"] = figures.draw_ecdf(results, "test")
    drawn["reliability"] = figures.draw_reliability(results)
    drawn["rejection"] = figures.draw_rejection(results)
    drawn["training"] = figures.draw_training(files)
    if diagnostics is not None:
        with _blaming(diagnostics.path):
            drawn |= _draw_diagnostics(diagnostics)
    return drawn


def _draw_diagnostics(diagnostics: File) -> dict[str, Figure]:
    drawn, header = {}, diagnostics.header
    if "by_samples" in header:
        drawn["samples"] = diagnostic_figures.draw_effect(header["by_samples"], "num_samples")
    if "by_batch_size" in header:
        drawn["batch-size"] = diagnostic_figures.draw_effect(header["by_batch_size"], "batch_size")
    if "statistics" in header:
        for layer in _shown_layers(header["statistics"]["layers"]):
            name = f"statistics-{diagnostic_figures.short_name(layer)}"
            drawn[name] = diagnostic_figures.draw_statistics(diagnostics, layer)
        drawn["ks"] = diagnostic_figures.draw_distances(diagnostics)
    if "gallery" in header:
        drawn["gallery"] = diagnostic_figures.draw_gallery(diagnostics)
    return drawn


def to_file_name(name: str) -> str:
    """Returns a name that is one part of a path, whatever a file calls a layer; different names stay different.

    Examples:
        >>> to_file_name("statistics-conv1"), to_file_name("statistics-/../up")
        ('statistics-conv1', 'statistics-%2F..%2Fup')
    """
    quoted = quote(name, safe="")
    # File systems take 255 bytes, of which the ending and what a half-written file is called need some.
    return quoted if len(quoted) <= 200 else f"{quoted[:120]}-{hashlib.sha256(name.encode()).hexdigest()}"


@contextmanager
def _blaming(path: Path | None) -> Iterator[None]:
    """Says of anything unforeseen which files it is in: they were checked, but numbers may be too large to draw."""
    try:
        yield
    except (DataError, OSError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(error)}"
        raise DataError(f"Expected to report {path}, got something beyond it ({reason}). Evaluate again.") from error


def _write_figures(folder: Path, drawn: dict[str, Figure]) -> dict[str, str]:
    """Writes each figure as PNG and SVG, removes those of an earlier report, and returns the SVGs as data URIs."""
    images, written = {}, set()
    rendered = {name: render(figure) for name, figure in drawn.items()}  # before any is replaced
    for name, formats in rendered.items():
        for kind, content in formats.items():
            file_name = f"{to_file_name(name)}.{kind}"
            _write(folder, f"figures/{file_name}", content)
            written.add(file_name)
            if kind == "svg":
                images[name] = embed(content, "svg+xml")
    for path in (folder / "figures").iterdir():
        ours = path.stem in _FIGURES or path.stem.startswith("statistics-")
        if ours and path.suffix in (".png", ".svg") and path.name not in written:
            path.unlink()
    return images


def _write(folder: Path, name: str, content: bytes) -> None:
    """Writes a file of the report, which may be on files from elsewhere: no link among them leads out of the folder."""
    path = folder / name
    if folder.resolve() not in path.resolve().parents:
        raise DataError(f"Expected to write into {folder}, got {path}, a link to {path.resolve()}. Remove the link.")
    write_atomically(path, content)


def _describe_methods(results: Results, scores: Scores, papers: Papers) -> dict[str, Any]:
    return {
        key: {
            "label": scored.label,
            "seeds": scored.seeds,
            "std_over": scored.std_over if len(scored.replicas) > 1 else None,
            **({"chosen": scored.chosen.values} if scored.chosen else {}),
            "scores": {name: asdict(found) for name, found in scores[key].items()},
            "paper": {name: asdict(found) for name, found in papers.get(key, {}).items()},
        }
        for key, scored in results.methods.items()
    }


def _shown_layers(layers: list[str]) -> list[str]:
    """Returns up to three layers: the first, the middle and the last."""
    return [layers[i] for i in sorted({0, len(layers) // 2, len(layers) - 1})] if layers else []
