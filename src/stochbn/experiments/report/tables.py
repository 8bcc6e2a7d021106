"""Scores → tables: for the page, in Markdown, in CSV and on the terminal. Pure functions, but for the printing."""

import csv
import io
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from stochbn.experiments.report.claims import Claim
from stochbn.experiments.report.paper import Papers, PaperScore
from stochbn.experiments.report.scores import METRICS, Results, Score, Scores

_TABLE_1 = ("error_percent", "nll", "entropy_out_of_domain")
_BOUND = ("lower", "marginal", "gap")
_VERDICTS = {True: "holds", False: "does not hold", None: "not measured"}


@dataclass(frozen=True)
class Grid:
    """A table as text; `best` marks the cells, by row and column, that are best in their row."""

    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()


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
            row.append(score_text(scores[name].get(metric.key), metric.digits))
            theirs = papers.get(name, {}).get(metric.key)
            if papers:
                row += [score_text(theirs, 3 if metric.key == "nll" else 2), theirs.verdict if theirs else "—"]
        rows.append(row)
    return Grid(header, rows)


def table_2(scores: Scores) -> Grid:
    """Lays out every metric in a row, every method in a column."""
    metrics = [metric for metric in METRICS if any(metric.key in row for row in scores.values())]
    rows, best = [], set()
    for metric in metrics:
        found = [row.get(metric.key) for row in scores.values()]
        rows.append([metric.label, *(score_text(one, metric.digits) for one in found)])
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
    """Returns a table in Markdown, the best cells in bold.

    Example:
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
                        rounded(found.value),
                        rounded(found.std),
                        "" if found.std is None else method.spread,
                    ),
                    *(found.num_inputs, " ".join(map(str, method.seeds))),
                    *((theirs.value, theirs.std, theirs.verdict) if theirs else ("", "", "")),
                ]
            )
    return buffer.getvalue()


def print_tables(
    console: Console, title: str, scores: Scores, papers: Papers, claims: list[Claim], appendices: list[Grid]
) -> None:
    """Prints the main scores, 80 columns wide, under each the paper's; the claims; the appendices."""
    table = _terminal_table(title, "Method")
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
        table.add_row(name, *(score_text(row[key], digits[key][0]) for key in columns))
        if papers.get(name):
            table.add_row(
                "  paper", *(score_text(papers[name].get(key), digits[key][1], "") for key in columns), style="dim"
            )
    console.print(table)
    colours = {True: "green", False: "red", None: "yellow"}
    for claim in claims:
        console.print(f"[{colours[claim.holds]}]{_VERDICTS[claim.holds]}[/]  {claim.statement}", highlight=False)
        console.print(f"[dim]  {claim.evidence}[/]", highlight=False)
    for grid in appendices:
        printed = _terminal_table(f"\n{grid.header[0]}", "", *grid.header[1:])
        for cells in grid.rows:
            printed.add_row(*cells)
        console.print(printed)


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
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 1, 0, 0)
    return table


def score_text(found: Score | PaperScore | None, digits: int, missing: str = "—") -> str:
    """Writes a number and, where there is one, its ±."""
    if found is None:
        return missing
    return f"{found.value:.{digits}f}" + ("" if found.std is None else f" ± {found.std:.{digits}f}")
