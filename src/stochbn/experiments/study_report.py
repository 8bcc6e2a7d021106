"""The numbers of the study → tables and figures. Pure functions, but for the writing."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console

from stochbn.experiments.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.figures import BLUE, FULL, GREEN, ORANGE, PURPLE, STYLE, VERMILION, render
from stochbn.experiments.scores import METRICS, Score
from stochbn.experiments.sources import write_atomically
from stochbn.experiments.study_scores import ENSEMBLES, TEMPERED
from stochbn.experiments.tables import Grid, score_text, to_markdown

_SOME = (("nll", 1, 4), ("ece", 100, 2), ("entropy_out_of_domain", 1, 3), ("auroc_entropy", 1, 4))
# Whose curves are drawn, and how.
LOOKS: dict[str, dict[str, Any]] = {
    "One network": {"color": "#777777", "linewidth": 1.0},
    "SBN": {"color": GREEN, "linestyle": "--"},
    "SBN, tuned": {"color": GREEN},
    "Empirical, conditioned, tuned": {"color": PURPLE},
    "Dropout": {"color": VERMILION},
    "Deep Ensembles": {"color": BLUE},
    "Deep Ensembles + empirical, conditioned, tuned": {"color": ORANGE},
}


def write_study(results: dict[str, Any], folder: Path, console: Console) -> Path:
    """Writes `study.json`, `study.md` and `figures/`; returns the path of the tables."""
    write_atomically(folder / "study.json", (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
    text = describe(results)
    write_atomically(folder / "study.md", text.encode())
    for name, figure in draw_figures(results).items():
        for ending, content in render(figure).items():
            write_atomically(folder / "figures" / f"{name}.{ending}", content)
    console.print(text, highlight=False, markup=False)
    return folder / "study.md"


def describe(results: dict[str, Any]) -> str:
    """Returns all tables in Markdown."""
    methods = [name for name in results["methods"] if not name.endswith(TEMPERED)]

    def text(method: str, key: str, digits: int, factor: float = 1) -> str:
        found = results["methods"][method]["scores"].get(key)
        if found is None:
            return "—"
        std = found["std"] and factor * found["std"]
        return score_text(Score(factor * found["value"], std, found["num_inputs"]), digits)

    compared = Grid(
        ["On the first networks alone", "NLL", "ECE, %", "Median entropy, out-of-domain", "AUROC, entropy"],
        [
            [
                f"{name}, seeds {', '.join(map(str, results['methods'][name]['seeds'][: results['num_compared']]))}",
                *(f"{factor * _mean_of_first(results, name, key):.{digits}f}" for key, factor, digits in _SOME),
            ]
            for name in methods
            if name not in ENSEMBLES
        ],
    )
    quality = Grid(
        [
            *("Method", "Networks", "Error, %", "NLL", "with temperature", "ECE, %", "with temperature"),
            *("Brier", "T", "spread"),
        ],
        [
            [
                name,
                str(len(results["methods"][name]["seeds"])) + (" together" if name in ENSEMBLES else ""),
                text(name, "error_percent", 2),
                text(name, "nll", 4),
                text(name + TEMPERED, "nll", 4),
                text(name, "ece", 2, factor=100),
                text(name + TEMPERED, "ece", 2, factor=100),
                text(name, "brier", 4),
                f"{np.mean(results['temperatures'][name]):.2f}",
                _spread(results, name),
            ]
            for name in methods
        ],
    )
    columns = [metric for metric in METRICS if metric.key.endswith(("entropy", "information", "out_of_domain"))]
    strange = Grid(
        ["Method", *(metric.label for metric in columns), "AUROC, entropy, with temperature"],
        [
            [name, *(text(name, m.key, m.digits) for m in columns), text(name + TEMPERED, "auroc_entropy", 4)]
            for name in methods
        ],
    )
    cost = Grid(
        ["Method", "Forward passes", "Training, h", "Weights, MB", "Statistics, kB"],
        [
            [
                name,
                f"{found['passes']:.0f}",
                f"{found['train_hours']:.2f}",
                f"{found['weights_bytes'] / 1e6:.2f}",
                f"{found['statistics_bytes'] / 1e3:.0f}",
            ]
            for name, found in results["cost"].items()
        ],
    )
    harder = Grid(
        ["NLL; ECE, %, by strength", *map(str, STRENGTHS)],
        [
            [name, *(f"{nll:.3f}; {100 * ece:.1f}" for nll, ece in zip(*_by_strength(found), strict=True))]
            for name, found in results["corruptions"].items()
        ],
    )
    exact = Grid(
        [
            *("Against exact inference", "total variation, test", "total variation, out of domain"),
            *("entropy correlation", "NLL", "AUROC, entropy"),
        ],
        [
            [
                name,
                f"{found['total_variation_test']:.4f}",
                f"{found['total_variation_out_of_domain']:.4f}",
                f"{found['entropy_correlation']:.3f}",
                f"{found['nll']:.4f}",
                f"{found['auroc_entropy']:.3f}",
            ]
            for name, found in results["exact"].items()
        ],
    )
    num = results["num_inputs"]
    notes = [
        f"Made by `{results['command']}`, commit {results['commit']}, from draws at "
        f"{' and '.join(results['drawn_at'])}, "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + f"; S = {results['num_samples']} draws of each network, seed {results['draw_seed']}.",
        f"n: {num['test']} test, {num['out-of-domain']} out-of-domain, {num['validation']} validation images; "
        f"{num['noise 1']} test images for each corruption and strength.",
        "Networks: the mean over networks scored one by one, ± the standard deviation over them; for an ensemble, over "
        "those that leave one member out. Spreads and temperatures are chosen on validation data, for each network.",
        "Corruptions: the mean over rotation, noise and blur.",
        f"Against exact inference: {results['num_exact']} test and as many "
        "out-of-domain inputs for each of its networks; distances in its own row are what chance makes between two "
        "halves of its mini-batches.",
    ]
    return "\n\n".join([*map(to_markdown, (quality, strange, compared, harder, exact, cost)), *notes]) + "\n"


def _mean_of_first(results: dict[str, Any], name: str, key: str) -> float:
    return float(np.mean([one[key] for one in results["methods"][name]["each"][: results["num_compared"]]]))


def _spread(results: dict[str, Any], name: str) -> str:
    found = results["tuning"].get(ENSEMBLES.get(name, name))
    if not found:
        return "—" if results["cost"][name]["statistics_bytes"] == 0 else "1"
    spreads = [one["spread"] for one in found]
    if isinstance(spreads[0], dict):
        return ", ".join(f"{np.mean([one[layer] for one in spreads]):.2f}" for layer in spreads[0])
    return f"{np.mean(spreads):.2f}"


def _by_strength(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    nll, ece = (
        [float(np.mean([found[f"{kind} {strength}"][key] for kind in CORRUPTIONS])) for strength in STRENGTHS]
        for key in ("nll", "ece")
    )
    return nll, ece


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws what the study found, by name of the file."""
    return {
        "methods": draw_methods(results),
        "corruptions": draw_corruptions(results),
        "tuning": draw_tuning(results),
    }


@matplotlib.rc_context(STYLE)
def draw_methods(results: dict[str, Any]) -> Figure:
    """Draws every method's NLL, ECE and AUROC, with its ± and, hollow, with a temperature."""
    names = [name for name in results["methods"] if not name.endswith(TEMPERED)][::-1]
    figure = Figure(figsize=(FULL, 0.5 + 0.21 * len(names)), layout="constrained")
    panels = (("nll", "NLL", 1), ("ece", "ECE, %", 100), ("auroc_entropy", "AUROC", 1))
    for axes, (key, label, factor) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for suffix, look in (("", {"marker": "o"}), (TEMPERED, {"marker": "o", "markerfacecolor": "white"})):
            found = [results["methods"][name + suffix]["scores"][key] for name in names]
            axes.errorbar(
                [factor * one["value"] for one in found],
                range(len(names)),
                xerr=[factor * (one["std"] or 0) for one in found],
                linestyle="",
                color=GREEN if suffix else BLUE,
                elinewidth=0.8,
                label="with temperature" if suffix else "as it is",
                **look,
            )
        if "Deep Ensembles" in names:
            axes.axvline(
                factor * results["methods"]["Deep Ensembles"]["scores"][key]["value"], color="black", linewidth=0.7
            )
        axes.set_xlabel(label)
        axes.set_yticks(range(len(names)), names)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_corruptions(results: dict[str, Any]) -> Figure:
    """Draws NLL and ECE against the strength of corruption, a column for each kind."""
    figure = Figure(figsize=(FULL, 4.8), layout="constrained")
    grid = figure.subplots(2, len(CORRUPTIONS), sharex=True, sharey="row")
    for column, kind in zip(grid.T, CORRUPTIONS, strict=True):
        for name, look in LOOKS.items():
            if name in results["corruptions"]:
                found = [results["corruptions"][name][f"{kind} {strength}"] for strength in STRENGTHS]
                column[0].plot(STRENGTHS, [one["nll"] for one in found], marker="o", label=name, **look)
                column[1].plot(STRENGTHS, [100 * one["ece"] for one in found], marker="o", **look)
        column[0].set(title=kind.capitalize(), yscale="log")
        column[1].set(xlabel="Strength", xticks=STRENGTHS)
    grid[0, 0].set_ylabel("NLL, nats")
    grid[1, 0].set_ylabel("ECE, %")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@matplotlib.rc_context(STYLE)
def draw_tuning(results: dict[str, Any]) -> Figure:
    """Draws the validation NLL against the spread for each family: the mean over networks, ± one standard deviation."""
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = iter((GREEN, VERMILION, BLUE, ORANGE, PURPLE, "#777777"))
    for name, found in results["tuning"].items():
        if name.startswith(("Members", "Dropout")) or name.endswith("by layer"):
            continue
        curves = [{spread: loss for spread, _, loss in one["curve"]} for one in found]
        spreads = sorted(set.intersection(*map(set, curves)))  # a search may have gone on for some networks
        losses = np.array([[curve[spread] for spread in spreads] for curve in curves])
        mean, std = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(spreads))
        colour = next(colours)
        axes.plot(spreads, mean, marker="o", color=colour, label=name.removesuffix(", tuned"))
        axes.fill_between(spreads, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="Spread k", ylabel="Validation NLL, nats")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend()
    return figure
