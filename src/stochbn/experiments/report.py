"""Prediction files → tables, figures and one page. Nothing is computed again that needs a network.

    write_report(Path("results/lenet5"))

writes `table.md`, `table.csv`, `scores.json`, `figures/` and `report.html` beside `predictions/`. The same files give
the same bytes.
"""

import base64
import csv
import io
import json
from dataclasses import asdict, dataclass, replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from stochbn.experiments import diagnostic_figures, figures
from stochbn.experiments.predictions import File, diagnostics_path
from stochbn.experiments.recipes import EXPERIMENTS
from stochbn.experiments.scores import (
    METRICS,
    Claim,
    Method,
    PaperScore,
    Results,
    Score,
    check_claims,
    collect,
    compare,
    score,
    select_exact,
)
from stochbn.experiments.sources import DataError, write_atomically

Scores = dict[str, dict[str, Score]]
Papers = dict[str, dict[str, PaperScore]]

NAMES = {
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "resnet18": "ResNet-18",
    "mnist": "MNIST",
    "notmnist": "notMNIST",
    "cifar5": "CIFAR5",
    "digits": "Digits",
}
_TABLE_1 = ("error_percent", "nll", "entropy_out_of_domain")
_VERDICTS = {True: "holds", False: "does not hold", None: "not measured"}


@dataclass(frozen=True)
class Grid:
    """A table as text; `best` marks the cells, by row and column, that are best in their row."""

    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()


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
    claims = check_claims(results, scores)
    exact = select_exact(results, diagnostics) if diagnostics else None
    exact_scores = score(exact) if exact else {}
    provenance, measured = describe_provenance(files, results), summarise(diagnostics)
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
    notes = describe_notes(results, bool(papers))
    images = _write_figures(folder / "figures", draw_all(results, files, diagnostics))
    text = {
        "scores.json": json.dumps(_rounded(numbers), indent=1, ensure_ascii=False) + "\n",
        "table.csv": to_csv(results, scores, papers),
        "table.md": "\n\n".join([*map(to_markdown, (first, second, third)), *notes]) + "\n",
        "report.html": render_page(
            title=describe_title(results),
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
    _print(console, describe_title(results), scores, papers, claims)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False, markup=False)
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


def table_1(results: Results, scores: Scores, papers: Papers) -> Grid:
    """Lays out the paper's Table 1 and its median out-of-domain entropies, a row for each method: ours, then theirs."""
    metrics = [
        metric for metric in METRICS if metric.key in _TABLE_1 and any(metric.key in row for row in scores.values())
    ]
    header = ["Method", "Networks"]
    for metric in metrics:
        header += [metric.label, "paper", "ours is"] if papers else [metric.label]
    rows = []
    for name, method in results.methods.items():
        row = [name, f"{len(method.seeds)}{' together' if name.startswith('Deep') else ''}"]
        for metric in metrics:
            row.append(_text(scores[name].get(metric.key), metric.digits))
            theirs = papers.get(name, {}).get(metric.key)
            if papers:
                row += [_text(theirs, 3 if metric.key == "nll" else 2), theirs.verdict if theirs else "—"]
        rows.append(row)
    return Grid(header, rows)


def table_2(scores: Scores) -> Grid:
    """Lays out every metric in a row, every method in a column."""
    metrics = [metric for metric in METRICS if any(metric.key in row for row in scores.values())]
    rows, best = [], set()
    for metric in metrics:
        found = [row.get(metric.key) for row in scores.values()]
        rows.append([metric.label, *(_text(one, metric.digits) for one in found)])
        values = [round(one.value, metric.digits) for one in found if one]
        if metric.better:
            target = min(values) if metric.better == "lower" else max(values)
            best |= {
                (len(rows) - 1, column)
                for column, one in enumerate(found, 1)
                if one and round(one.value, metric.digits) == target
            }
    return Grid(["", *scores], rows, frozenset(best))


def claims_table(claims: list[Claim]) -> Grid:
    """Lays out the claims: what the paper says, whether it holds here, the numbers."""
    return Grid(
        ["The paper's claim", "Here", "Measured"], [[c.statement, _VERDICTS[c.holds], c.evidence] for c in claims]
    )


def to_markdown(grid: Grid) -> str:
    """Returns a table in Markdown, the best cells in bold.

    >>> print(to_markdown(Grid(["", "SBN"], [["NLL", "0.02"]], frozenset({(0, 1)}))))
    |  | SBN |
    | --- | --- |
    | NLL | **0.02** |
    """
    lines = [grid.header, ["---"] * len(grid.header)]
    for i, row in enumerate(grid.rows):
        lines.append([f"**{cell}**" if (i, j) in grid.best else cell for j, cell in enumerate(row)])
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def to_csv(results: Results, scores: Scores, papers: Papers) -> str:
    """Returns every number in a line of its own, with what it is over and the paper's beside it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["method", "metric", "value", "std", "std_over", "n", "seeds", "paper", "paper_std", "ours_is"])
    for name, row in scores.items():
        method = results.methods[name]
        for key, found in row.items():
            theirs = papers.get(name, {}).get(key)
            writer.writerow(
                [
                    *(
                        name,
                        key,
                        _rounded(found.value),
                        _rounded(found.std),
                        "" if found.std is None else method.spread,
                    ),
                    *(found.num_inputs, " ".join(map(str, method.seeds))),
                    *((theirs.value, theirs.std, theirs.verdict) if theirs else ("", "", "")),
                ]
            )
    return buffer.getvalue()


def summarise(diagnostics: File | None) -> dict[str, Any]:
    """Returns the numbers of the diagnostics, the distances of a layer's channels as median, maximum and count."""
    if diagnostics is None:
        return {}
    kept = ("network", "command", "commit", "versions", "bound", "by_samples", "by_batch_size", "statistics", "gallery")
    numbers = {key: diagnostics.header[key] for key in kept if key in diagnostics.header}
    if "statistics" in numbers:
        distances = {}
        for layer in numbers["statistics"]["layers"]:
            both = diagnostics.tensors[f"statistics/{layer}/ks"]  # (2, C)
            finite = [row[~row.isnan()] for row in both]
            distances[layer] = {
                symbol: {"median": row.median().item(), "max": row.max().item(), "num_channels": len(row)}
                for symbol, row in zip(("mean", "log variance"), finite, strict=True)
                if len(row)
            }
        numbers["statistics"] = {**numbers["statistics"], "ks": distances}
    return numbers


def describe_provenance(files: list[File], results: Results) -> dict[str, Any]:
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


def describe_notes(results: Results, has_paper: bool) -> list[str]:
    """Returns what a reader of the tables must know."""
    notes = []
    if any(len(method.outputs) > 1 for method in results.methods.values()):
        notes.append(
            "One network, SBN, Dropout and Dropout + SBN: the mean over networks trained from different seeds, scored "
            "one by one, ± the standard deviation over these seeds."
        )
    ensemble = results.methods.get("Deep Ensembles")
    if ensemble:
        notes.append(
            f"Deep Ensembles: the ensemble of all {len(ensemble.seeds)} networks, ± the standard deviation over "
            f"{ensemble.spread} that leave one network out. Those share members, so this ± understates how "
            "ensembles trained apart differ."
        )
    else:
        notes.append("Deep Ensembles need at least two networks without dropout; there are fewer.")
    if has_paper:
        notes.append(
            "“Within ±” compares with the paper's ±, and half a unit of its last digit for rounding. The paper prints "
            "no number for one plain network. Its median entropies are read off its plots, to about 0.02."
        )
    if not results.has_out_of_domain:
        notes.append("The files hold no out-of-domain predictions, so all that needs them is left out.")
    return notes


def describe_title(results: Results) -> str:
    """Returns the networks and the data, as a title."""
    header = results.header
    network = NAMES.get(header["experiment"], header["experiment"])
    data, other = (NAMES.get(header[key], header[key]) for key in ("data", "out_of_domain"))
    known = network if data == network else f"{network}, {data}"
    if not results.has_out_of_domain:
        return known
    return f"{known} against {'its hidden classes' if other == data else other}"


def render_page(**content: Any) -> str:
    """Renders the page, which needs nothing outside itself."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = package_files("stochbn.experiments").joinpath("templates", "report.html.j2").read_text("utf-8")
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
        if path.suffix in (".png", ".svg") and path.name not in written:
            path.unlink()
    return images


def _print(console: Console, title: str, scores: Scores, papers: Papers, claims: list[Claim]) -> None:
    """Prints the main scores, 80 columns wide, under each the paper's, and the claims."""
    table = Table(title=title, title_justify="left")
    table.box, table.show_edge, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
    table.add_column("Method")
    columns = {
        "error_percent": "Error, %",
        "nll": "NLL",
        "entropy_out_of_domain": "OOD entropy",
        "auroc_entropy": "AUROC",
    }
    digits = {"error_percent": (2, 2), "nll": (4, 3), "entropy_out_of_domain": (3, 2), "auroc_entropy": (3, 3)}
    columns = {key: label for key, label in columns.items() if any(key in row for row in scores.values())}
    for label in columns.values():
        table.add_column(label)
    for name, row in scores.items():
        table.add_row(name, *(_text(row[key], digits[key][0]) for key in columns))
        if papers.get(name):
            table.add_row(
                "  paper", *(_text(papers[name].get(key), digits[key][1], "") for key in columns), style="dim"
            )
    console.print(table)
    colours = {True: "green", False: "red", None: "yellow"}
    for claim in claims:
        console.print(f"[{colours[claim.holds]}]{_VERDICTS[claim.holds]}[/]  {claim.statement}", highlight=False)
        console.print(f"[dim]  {claim.evidence}[/]", highlight=False)


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


def _text(found: Score | PaperScore | None, digits: int, missing: str = "—") -> str:
    if found is None:
        return missing
    return f"{found.value:.{digits}f}" + ("" if found.std is None else f" ± {found.std:.{digits}f}")


def _rounded(value: Any) -> Any:
    """Rounds every float to 6 digits: more would be noise, and differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
