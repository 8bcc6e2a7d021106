"""`python -m benchmarks`: measures everything, prints tables, writes `bench.json` and the figure.

Every number is a ratio of times that were measured side by side, round by round, in one run.
"""

import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import memory, stages
from benchmarks.figure import draw
from benchmarks.limits import GEMM_SIZES, gemm_rate
from benchmarks.machine import describe
from benchmarks.measure import SHORTEST
from benchmarks.report import print_report
from benchmarks.stages import GROWING, NUM_FIT_IMAGES, Settings, Update
from benchmarks.subjects import KINDS, Subject
from benchmarks.targets import add_fractions, judge
from stochbn.experiments.report.tables import rounded
from stochbn.pages.figures import render

DEFAULT = Settings()
# Takes seconds: it shows that everything runs, and its numbers mean nothing.
QUICK = Settings(
    networks=("lenet5",),
    rows=(1,),
    samples=(2,),
    repeats=2,
    compiles=False,
    most_fit_images=256,
    growth_samples=(2, 4),
    growth_rows=(1, 2),
    memory_samples=(2, 4),
)
RESULTS = Path("results")

NOTES = {
    "times": f"seconds of timed_draws draws, a number a round; below {SHORTEST} s the mean of several runs in a row",
    "seconds": "scaled to all draws where timed_draws are fewer",
    "ratio": "to the plain passes of the same round; then median and quartiles over the rounds",
    "flops": "two for each multiply-add of convolutions and linear layers; in front of the first BatchNorm layer once",
    "gemm_fraction": "needed FLOPs / median seconds / gemm_flops, the best float32 matrix product of the run",
    "memory": "bytes; before is after a plain pass, peak is during predict, each S in a process of its own",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    networks: Annotated[str | None, typer.Option(help=f"Some of {','.join(KINDS)}.")] = None,
    rows: Annotated[str | None, typer.Option(help="N, such as 1,16,128.")] = None,
    samples: Annotated[str | None, typer.Option(help="S, such as 10,50.")] = None,
    repeats: Annotated[int | None, typer.Option(min=2, help="Rounds of each cell.", show_default="7")] = None,
    compile: Annotated[bool | None, typer.Option(help="Measure compiled passes too.", show_default="yes")] = None,  # noqa: A002
    quick: Annotated[bool, typer.Option("--quick", help="A run of seconds whose numbers mean nothing.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for bench.json, bench.png and bench.svg.")] = RESULTS,
) -> None:
    """Measures stochbn.predict and fit against everything that they replace."""
    settings = _settings(QUICK if quick else DEFAULT, networks, rows, samples, repeats, compile)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    start = time.perf_counter()
    with warnings.catch_warnings():
        # Random networks on random images; and a fallback to the loop would be timed as if it were ours.
        warnings.filterwarnings("ignore", message="The loader does not (look|seem)|The model has seen")
        warnings.filterwarnings("error", message=".*cannot be vectorised over draws")
        results = describe(_command(settings, quick)) | {"settings": asdict(settings), "notes": NOTES}
        results |= measure(settings, console, gemm_sizes=(256,) if quick else GEMM_SIZES)
    results["minutes"] = (time.perf_counter() - start) / 60
    print_report(console, results)
    for path in write(results, output):
        console.print(f"wrote {path}", highlight=False)


def measure(settings: Settings, console: Console, *, gemm_sizes: tuple[int, ...]) -> dict[str, Any]:
    """Runs all stages, network by network, and shows progress."""
    results: dict[str, Any] = {"cells": [], "fit": [], "growth": [], "memory": []}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("GEMM rate", total=None)

        def updating(where: str) -> Update:
            return lambda doing: progress.update(task, description=f"{where}: {doing}")

        rates = [gemm_rate(sizes=gemm_sizes)]
        for network in settings.networks:
            name = KINDS[network].name
            begun = time.perf_counter()
            progress.update(task, description=f"{name}: building")
            try:
                subject = Subject(network)
            except ImportError as error:
                console.print(f"{name}: left out, {error}", highlight=False)
                continue
            for num_rows in (1,) if subject.kind.is_large else settings.rows:
                for num_samples in settings.samples:
                    where = f"{name}, N = {num_rows}, S = {num_samples}"
                    cell = stages.measure_cell(subject, num_rows, num_samples, settings, updating(where))
                    results["cells"].append(cell)
                    console.print(f"{where}: done", highlight=False)
            if network in NUM_FIT_IMAGES:
                results["fit"].append(stages.measure_fit(subject, settings, updating(f"{name}, fit")))
            if network in GROWING:
                results["growth"].append(stages.measure_growth(subject, settings, updating(name)))
            for found in [case for case in memory.CASES if case[0] == network]:
                results["memory"].append(stages.measure_memory(*found, settings, updating(name)))
            rates.append(gemm_rate(sizes=gemm_sizes))
            # torch counts recompilations of one function, nn.Sequential's pass, over all networks.
            torch.compiler.reset()
            console.print(f"{name}: {(time.perf_counter() - begun) / 60:.1f} minutes", highlight=False)
    results["gemm_flops"] = max(rates)
    add_fractions(results["cells"], results["gemm_flops"])
    results["targets"] = judge(results)
    return results


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the JSON and the figure as PNG and SVG; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "bench.json"]
    paths[0].write_text(json.dumps(rounded(results), indent=1, ensure_ascii=False) + "\n")
    for ending, content in render(draw(results)).items():
        paths.append(folder / f"bench.{ending}")
        paths[-1].write_bytes(content)
    return paths


def _settings(
    base: Settings,
    networks: str | None,
    rows: str | None,
    samples: str | None,
    repeats: int | None,
    compiles: bool | None,
) -> Settings:
    chosen: dict[str, Any] = {}
    if networks is not None:
        chosen["networks"] = tuple(networks.split(","))
        unknown = [name for name in chosen["networks"] if name not in KINDS]
        if unknown:
            raise typer.BadParameter(f"Expected networks among {', '.join(KINDS)}, got {', '.join(unknown)}.")
    for key, text in (("rows", rows), ("samples", samples)):
        if text is not None:
            chosen[key] = _numbers(key, text)
    if repeats is not None:
        chosen["repeats"] = repeats
    if compiles is not None:
        chosen["compiles"] = compiles
    return replace(base, **chosen)


def _numbers(key: str, text: str) -> tuple[int, ...]:
    least = 2 if key == "samples" else 1
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise typer.BadParameter(f"Expected --{key} as whole numbers of at least {least}, as 2,16, got {text!r}.")
    return found


def _command(settings: Settings, quick: bool) -> str:
    """Returns the command that gives these settings."""
    base = QUICK if quick else DEFAULT
    words = ["python -m benchmarks", *(["--quick"] if quick else [])]
    for key in ("networks", "rows", "samples"):
        if getattr(settings, key) != getattr(base, key):
            words.append(f"--{key} {','.join(map(str, getattr(settings, key)))}")
    if settings.repeats != base.repeats:
        words.append(f"--repeats {settings.repeats}")
    if settings.compiles != base.compiles:
        words.append("--compile" if settings.compiles else "--no-compile")
    return " ".join(words)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits."""
    app(sys.argv[1:] if arguments is None else list(arguments), prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
