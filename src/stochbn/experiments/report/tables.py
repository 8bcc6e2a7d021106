"""Scores → tables: for the page, in Markdown, in CSV and on the terminal. Pure functions, but for the printing."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stochbn.experiments.files import File
from stochbn.experiments.report.collect import has_dropout
from stochbn.experiments.report.differences import Difference
from stochbn.experiments.report.paper import Claim, Papers, PaperScore
from stochbn.experiments.report.scores import METRICS, Metric, Results, Score, Scores, log_loss
from stochbn.pages.page import Grid

_TABLE_1 = ("error_percent", "nll", "entropy_out_of_domain")
_BOUND = ("lower", "marginal", "gap")
# The compared metrics with their column, a factor, and digits.
_COMPARED = (
    ("error_percent", "Error, %", 1, 2),
    ("nll", "NLL", 1, 4),
    ("ece", "ECE, %", 100, 2),
    ("brier", "Brier", 1, 4),
    ("auroc_entropy", "AUROC", 1, 4),
    ("aupr_entropy", "AUPR", 1, 4),
    ("fpr95_entropy", "FPR95", 1, 4),
)
# Columns on the terminal, with the digits of our numbers and of the paper's.
_PRINTED = {
    "error_percent": ("Error, %", 2, 2),
    "nll": ("NLL", 4, 3),
    "entropy_out_of_domain": ("OOD entropy", 3, 2),
    "auroc_entropy": ("AUROC", 3, 3),
}
_VERDICTS = {True: "holds", False: "does not hold", None: "not measured"}


def table_1(results: Results, scores: Scores, papers: Papers) -> Grid:
    """Lays out the paper's Table 1 and its median out-of-domain entropies, a row for each method: ours, then theirs."""
    metrics = [metric for metric in _list_metrics(scores) if metric.key in _TABLE_1]
    header = ["Method", "Networks"]
    for metric in metrics:
        header += [metric.label, "paper", "ours is"] if papers else [metric.label]
    rows = []
    for key, scored in results.methods.items():
        row = [scored.method.label, scored.count + (" together" if scored.method.members else "")]
        for metric in metrics:
            row.append(score_text(scores[key].get(metric.key), metric.digits))
            theirs = papers.get(key, {}).get(metric.key)
            if papers:
                row += [score_text(theirs, 3 if metric.key == "nll" else 2), theirs.verdict if theirs else "—"]
        rows.append(row)
    return Grid(header, rows)


def table_2(results: Results, scores: Scores, *, marks_best: bool = True, of: str | None = None) -> Grid:
    """Lays out every metric in a row, every method in a column; the best of each row is bold.

    `of` has those metrics alone that are of the known data, "test", or also of others, "out-of-domain".
    """
    rows, bold = [], set()
    for metric in _list_metrics(scores):
        if of is not None and of != metric.parts[-1]:
            continue
        found = [row.get(metric.key) for row in scores.values()]
        rows.append([metric.label, *(score_text(one, metric.digits) for one in found)])
        if metric.better and marks_best:
            values = {column: round(one.value, metric.digits) for column, one in enumerate(found, 1) if one}
            best = min(values.values()) if metric.better == "lower" else max(values.values())
            bold |= {(len(rows) - 1, column) for column, value in values.items() if value == best}
    return Grid(["", *(results.methods[key].label for key in scores)], rows, frozenset(bold))


def _list_metrics(scores: Scores) -> list[Metric]:
    return [metric for metric in METRICS if any(metric.key in row for row in scores.values())]


def claims_table(claims: list[Claim]) -> Grid:
    """Lays out the claims: what is said, whether it holds here, the numbers."""
    return Grid(["Claim", "Here", "Measured"], [[c.statement, _VERDICTS[c.holds], c.evidence] for c in claims])


def differences_table(differences: Sequence[Difference], labels: Mapping[str, str]) -> Grid:
    """Lays out differences with their intervals, by the labels of both methods; intervals without 0 are bold."""
    columns = [column for column in _COMPARED if any(column[0] in found.scores for found in differences)]
    rows, bold = [], set()
    for found in differences:
        rows.append([f"{labels[found.first]} − {labels[found.second]}"])
        for position, (key, _, factor, digits) in enumerate(columns, 1):
            interval = found.scores[key]
            difference, *ends = (f"{factor * value:+.{digits}f}" for value in astuple(interval))
            rows[-1].append(f"{difference} ({' to '.join(ends)})")
            if interval.excludes_zero:
                bold.add((len(rows) - 1, position))
    return Grid(["Difference (95 % interval)", *(label for _, label, _, _ in columns)], rows, frozenset(bold))


def training_table(files: Sequence[File], results: Results) -> Grid:
    """Lays out the training loss beside the losses on held-out data; no rows where the files do not have it."""
    test: dict[tuple[str, int], float] = {
        (key, seed): log_loss(output["test"].probs, results.labels).mean().item()
        for key in ("plain", "dropout")
        if key in results.methods
        for seed, output in zip(results.methods[key].seeds, results.methods[key].outputs, strict=True)
    }
    rows = []
    for file in files:
        header, key = file.header, "dropout" if has_dropout(file) else "plain"
        if not header.get("train_loss") or (key, header["seed"]) not in test:
            continue
        losses = header["train_loss"][-1], header["validation_nll"][-1], test[key, header["seed"]]
        rows.append([f"{header['recipe']} seed {header['seed']}", *(f"{loss:.4f}" for loss in losses)])
    return Grid(["Network", "Training loss, last epoch", "Validation NLL", "Test NLL"], rows)


def appendix_tables(measured: dict[str, Any]) -> list[Grid]:
    """Lays out Appendix B, the distance of r(μ) and r(σ) to real mini-batches by layer, and Appendix A, the bound."""
    grids = []
    if statistics := measured.get("statistics"):
        rows = [
            [layer, symbol, *(f"{row[key]:.4f}" for key in ("median", "max")), str(row["num_channels"])]
            for layer, found in statistics["ks"].items()
            for symbol, row in found.items()
        ]
        count = f"n = {statistics['num_batches']:,} mini-batches of {statistics['batch_size']}"
        grids.append(Grid([f"Appendix B, {count}", "of", "KS, median", "highest", "channels"], rows))
    if bound := measured.get("bound"):
        rows = [
            [stage, *(f"{value:.4f} ± {error:.4f}" for value, error in (bound[key][side] for side in _BOUND))]
            for stage, key in (("at initialisation", "before"), ("trained", "after"))
        ]
        count = f"n = {bound['num_examples']:,} training inputs, {bound['num_samples']} mini-batches"
        grids.append(Grid([f"Appendix A, {count}", "Lower bound", "Marginal", "Gap"], rows))
    return grids


def to_markdown(grid: Grid) -> str:
    """Returns a table in Markdown.

    Examples:
        >>> print(to_markdown(Grid(["", "SBN"], [["NLL", "0.02"]], frozenset({(0, 1)}))))
        |  | SBN |
        | --- | --- |
        | NLL | **0.02** |
    """
    lines = [[*map(escape, grid.header)], ["---"] * len(grid.header)]
    for i, row in enumerate(grid.rows):
        cells = map(escape, row)
        lines.append([f"**{cell}**" if (i, j) in grid.bold else cell for j, cell in enumerate(cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    r"""Returns Markdown that shows a text as it is, whatever a file calls its layers: no HTML, links or code.

    Examples:
        >>> print(escape("<b>|[a](b)| < 3"))
        &lt;b>\|\[a\](b)\| < 3
    """
    text = re.sub(r"&(?=[\w#])", "&amp;", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    return re.sub(r"([\\`|\[\]])", r"\\\1", text)


def to_csv(results: Results, scores: Scores, papers: Papers) -> str:
    """Returns every number in a line of its own, with what it is over and the paper's beside it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["method", "metric", "value", "std", "std_over", "n", "seeds", "paper", "paper_std", "ours_is"])
    for method, row in scores.items():
        scored = results.methods[method]
        seeds = " ".join(map(str, scored.seeds))
        for key, found in row.items():
            theirs = papers.get(method, {}).get(key)
            std_over = "" if found.std is None else scored.std_over
            ours = [method, key, rounded(found.value), rounded(found.std), std_over, found.num_inputs, seeds]
            writer.writerow([*ours, *((theirs.value, theirs.std, theirs.verdict) if theirs else ("", "", ""))])
    return buffer.getvalue()


def print_tables(
    console: Console, title: str, results: Results, scores: Scores, papers: Papers, claims: list[Claim]
) -> None:
    """Prints the main scores, 80 columns wide, under each the paper's, and the claims."""
    columns = {key: look for key, look in _PRINTED.items() if any(key in row for row in scores.values())}
    table = _terminal_table(title, "Method", *(label for label, _, _ in columns.values()))
    for method, row in scores.items():
        cells = [score_text(row.get(key), digits) for key, (_, digits, _) in columns.items()]
        table.add_row(results.methods[method].label, *cells)
        if papers.get(method):
            theirs = papers[method]
            cells = [score_text(theirs.get(key), digits, "") for key, (_, _, digits) in columns.items()]
            table.add_row("  paper", *cells, style="dim")
    console.print(table, markup=False)
    colours = {True: "green", False: "red", None: "yellow"}
    for claim in claims:
        console.print(Text.assemble((_VERDICTS[claim.holds], colours[claim.holds]), f"  {claim.statement}"))
        console.print(Text(f"  {claim.evidence}", "dim"))


def print_grid(console: Console, grid: Grid) -> None:
    """Prints a table under the first word of its header."""
    printed = _terminal_table(f"\n{grid.header[0]}", "", *grid.header[1:])
    for cells in grid.rows:
        printed.add_row(*cells)
    console.print(printed, markup=False)


def rounded(value: Any) -> Any:
    """Rounds every float to 6 digits: more would be noise, and differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def _terminal_table(title: str, *columns: str) -> Table:
    # A title of plain text would be read as markup, also where the rest is not.
    table = Table(*columns, title=Text(title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 1, 0, 0)
    return table


def score_text(found: Score | PaperScore | None, digits: int, missing: str = "—") -> str:
    """Writes a number and, where there is one, its ±."""
    if found is None:
        return missing
    return f"{found.value:.{digits}f}" + ("" if found.std is None else f" ± {found.std:.{digits}f}")
