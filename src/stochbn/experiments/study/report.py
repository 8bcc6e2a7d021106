"""The numbers of the study → tables. Pure functions, but for reading and writing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.data.sources import DataError, write_atomically
from stochbn.experiments.report.figures import render
from stochbn.experiments.report.scores import METRICS, Score
from stochbn.experiments.report.tables import Grid, score_text, to_markdown
from stochbn.experiments.study.figures import draw_figures
from stochbn.experiments.study.results import TEMPERED
from stochbn.experiments.study.scores import ENSEMBLES
from stochbn.experiments.study.study import LAST

_SOME = (("nll", 1, 4), ("ece", 100, 2), ("entropy_out_of_domain", 1, 3), ("auroc_entropy", 1, 4))


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


def read_study(folder: Path) -> dict[str, Any]:
    """Reads the numbers that `write_study` wrote.

    Raises:
        DataError: There are none.
    """
    try:
        found: dict[str, Any] = json.loads((folder / "study.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"Expected an earlier study in {folder}, got none ({error}). Leave --only away to draw all variants."
        ) from error
    return found


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
            *("Method", "Networks", "Error, %", "NLL", "with temperature", "ECE, %", "by chance", "with temperature"),
            *("by chance", "Brier", "T", "spread"),
        ],
        [
            [
                name,
                str(len(results["methods"][name]["seeds"])) + (" together" if name in ENSEMBLES else ""),
                text(name, "error_percent", 2),
                text(name, "nll", 4),
                text(name + TEMPERED, "nll", 4),
                *(
                    cell
                    for method in (name, name + TEMPERED)
                    for cell in (text(method, "ece", 2, factor=100), _chance(results, method))
                ),
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
    compared_scores = (
        ("error_percent", 1, 2),
        ("nll", 1, 4),
        ("ece", 100, 2),
        ("brier", 1, 4),
        ("auroc_entropy", 1, 4),
    )
    differences = Grid(
        ["Difference, and its 95 % interval", "Error, %", "NLL", "ECE, %", "Brier", "AUROC, entropy"],
        [
            [name, *(_interval(found[key], factor, digits) for key, factor, digits in compared_scores)]
            for name, found in results["comparisons"].items()
        ],
    )
    limits = Grid(
        [
            *("Chosen on test data, as a limit", "networks", "NLL, best spread", "best temperature", "best of both"),
            "AUROC, best spread",
        ],
        [
            [
                name,
                f"{found['num_networks']:.0f}",
                *(f"{found[key]:.4f}" for key in ("nll", "nll_temperature_only", "nll_temperature", "auroc")),
            ]
            for name, found in results["limits"].items()
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
        "ECE by chance: of labels drawn from the predicted probabilities, that is, if they are right; the mean, and "
        "what is exceeded in one case of twenty. It is higher where more inputs are unsure.",
        "Corruptions: the mean over rotation, noise and blur.",
        f"Against exact inference: {results['num_exact']} test and as many "
        "out-of-domain inputs for each of its networks; distances in its own row are what chance makes between two "
        "halves of its mini-batches.",
        "Differences: paired bootstrap over test and out-of-domain images, and over networks where a method is scored "
        f"on each, given the one ensemble; {results['num_resamples']} resamples. An interval without 0 is in bold; "
        "among so many, one or two may be so by chance.",
        "Chosen on test data: what the best spread and temperature of each network, found by the test labels "
        f"themselves, would have given, with {results['num_samples']} draws (of {LAST} all). No method; a limit to "
        "what choosing them on other data can reach.",
    ]
    if LAST in results["cost"]:
        notes.append(
            f"{LAST}: the statistics of {results['cost'][LAST]['passes']:.0f} real mini-batches in the last BatchNorm "
            "layer alone, each drawn once, inputs counted in (empirical, conditioned); the other layers keep to their "
            "running statistics."
        )
    if results.get("carried_over"):
        kept: dict[str, list[str]] = {}
        for name, source in results["carried_over"].items():
            if not name.endswith(TEMPERED):
                kept.setdefault(f"`{source['command']}`, commit {source['commit']}", []).append(name)
        notes += [
            f"Measured earlier on the same networks and data, by {source}: {'; '.join(names)}."
            for source, names in kept.items()
        ]
        notes.append("Hours of training are those of the run that a row was measured on; machines and loads differ.")
    draws = Grid(
        ["The first draws", "", "NLL", "ECE, %", "median entropy", "AUROC"],
        [
            [name, f"{row['num_samples']:.0f}", *(f"{factor * row[key]:.{digits}f}" for key, factor, digits in _SOME)]
            for name, rows in results["draws"].items()
            for row in rows
        ],
    )
    tables = (quality, strange, differences, draws, limits, compared, harder, exact, cost)
    return "\n\n".join([*map(to_markdown, tables), *notes]) + "\n"


def _chance(results: dict[str, Any], name: str) -> str:
    found = results["ece_by_chance"].get(name)
    return "—" if found is None else f"{100 * found['mean']:.2f}, {100 * found['high']:.2f}"


def _interval(found: dict[str, float], factor: float, digits: int) -> str:
    difference, low, high = (factor * found[key] for key in ("difference", "low", "high"))
    text = f"{difference:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{text}**" if low > 0 or high < 0 else text


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
