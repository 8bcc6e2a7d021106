"""Results → tables on the terminal."""

from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.contenders import CONTENDERS, LEFT_OUT, OURS, PLAIN
from benchmarks.subjects import KINDS
from benchmarks.targets import OURS_NAMES, growth_medians, ratio_target


def print_report(console: Console, results: dict[str, Any]) -> None:
    """Prints the ratios of each network, fitting, growth, memory, and every target with its verdict."""
    for network in dict.fromkeys(cell["network"] for cell in results["cells"]):
        console.print(ratio_table([cell for cell in results["cells"] if cell["network"] == network]))
    if results["growth"]:
        console.print(growth_table(results["growth"]))
    if results["memory"]:
        console.print(memory_table(results["memory"]))
    console.print(target_table(results["targets"]))
    console.print(
        f"GEMM rate: {results['gemm_flops'] / 1e9:.1f} GFLOP/s in float32, the best of the run", highlight=False
    )


def ratio_table(cells: list[dict[str, Any]]) -> RenderableType:
    """Lays out one network: a row for each contender, a column for each N and S."""
    table = _table("", *(f"N = {cell['rows']}\nS = {cell['samples']}" for cell in cells))
    partial = False
    for contender in CONTENDERS:
        row: list[RenderableType] = []
        for cell in cells:
            found = cell["contenders"].get(contender.name)
            if found is None:
                row.append(Text(cell["missing"].get(contender.name, "—"), style="dim"))
                continue
            cut = contender.passes is not None and found["timed_draws"] < cell["samples"]
            partial |= cut
            target = ratio_target(cell["network"], cell["rows"], cell["samples"], contender.name)
            row.append(_cell(found, target, is_plain=contender is PLAIN, draws=found["timed_draws"] if cut else None))
        if any(cell["missing"].get(contender.name) != LEFT_OUT for cell in cells):
            table.add_row(contender.name, *row)
    for name in (PLAIN.name, *OURS_NAMES):
        if name in cells[0]["contenders"]:
            row = [f"{100 * cell['contenders'][name]['gemm_fraction']:.0f} %" for cell in cells]
            table.add_row(f"GEMM rate, {name}", *row)
    title = f"{KINDS[cells[0]['network']].name}: time / time of S plain passes, median ± half the interquartile range"
    return _titled(title, table, "* timed on so many draws, scaled to S" if partial else "")


def growth_table(growth: list[dict[str, Any]]) -> RenderableType:
    """Lays out how time grows with S at N = 1 and with N at S = 10."""
    table = _table("Network", "N", "S", "predict, ms", "plain passes, ms", "ratio")
    for found in growth:
        points = [*found["with_samples"], *found["with_rows"]]
        medians = (growth_medians(points, name) for name in (OURS.name, PLAIN.name))
        for point, our, plain in zip(points, *medians, strict=True):
            name = KINDS[found["network"]].name
            table.add_row(
                name, *(str(point[key]) for key in ("rows", "samples")), _ms(our), _ms(plain), f"{our / plain:.2f}"
            )
    return _titled("Growth with S at N = 1, and with N at S = 10", table)


def memory_table(memory: list[dict[str, Any]]) -> RenderableType:
    """Lays out the peak memory against S."""
    table = _table("Network", "N", "S", "before, MB", "peak, MB", "growth, MB")
    for case in memory:
        for found in case["measured"]:
            sizes = (found["before"], found["peak"], found["peak"] - found["before"])
            table.add_row(
                KINDS[case["network"]].name,
                str(case["rows"]),
                str(found["samples"]),
                *(f"{size / 2**20:.1f}" for size in sizes),
            )
    return _titled("Peak memory of predict(keep_samples=False)", table)


def target_table(verdicts: list[dict[str, Any]]) -> RenderableType:
    """Lays out every target, what was measured, and whether it is met."""
    table = _table("", "target", "measured", "")
    for verdict in verdicts:
        target = f"≥ {verdict['at_least']:.2f}" if "at_least" in verdict else f"≤ {verdict['at_most']:.2f}"
        table.add_row(verdict["what"], target, f"{verdict['measured']:.3f}", _verdict(verdict["met"]))
    return _titled("Targets", table)


def _cell(found: dict[str, Any], target: float | None, *, is_plain: bool, draws: int | None) -> Text:
    if is_plain:
        text = Text(f"{_ms(found['seconds']['median'])} ms")
    else:
        ratio = found["ratio"]
        text = Text(f"{_number(ratio['median'])} ± {_number((ratio['q3'] - ratio['q1']) / 2)}")
    if target is not None:
        text.append(f"\n≤ {target:.2f} ").append_text(_verdict(found["ratio"]["median"] <= target))
    if draws is not None:
        text.append(f"\n* {draws} draws", style="dim")
    return text


def _verdict(met: bool) -> Text:
    return Text("met", style="green") if met else Text("missed", style="red")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.0f}"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:,.0f}"


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.padding = False, False, (0, 2, 0, 0)
    return table


def _titled(title: str, table: Table, note: str = "") -> Group:
    return Group(Text(f"\n{title}", style="bold"), table, *([Text(note, style="dim")] if note else []))
