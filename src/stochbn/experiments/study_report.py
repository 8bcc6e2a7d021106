"""Draws of every method → scores, tables and figures. Nothing here runs a network.

    write_study(study, Path("results/beyond/lenet5"))

A method's temperature is chosen on its validation draws, and divides the log-probabilities of each draw.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

import stochbn
from stochbn.experiments.checkpoints import checkpoint_path, read_checkpoint
from stochbn.experiments.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.evaluate import provenance
from stochbn.experiments.figures import BLUE, FULL, GREEN, ORANGE, PURPLE, STYLE, VERMILION, render
from stochbn.experiments.predictions import PARTS, File
from stochbn.experiments.scores import METRICS, Method, Output, Results, detect, score
from stochbn.experiments.scores import measure as score_outputs
from stochbn.experiments.sources import write_atomically
from stochbn.experiments.study import NUM_COMPARED, NUM_EXACT, VARIANTS, Job, Study
from stochbn.experiments.tables import Grid, rounded, to_markdown
from stochbn.tuning import TEMPERATURES, find_minimum

# Ensembles by name, and whose draws their members make.
ENSEMBLES = {
    "Deep Ensembles": "One network",
    "Deep Ensembles + SBN": "SBN",
    "Deep Ensembles + SBN, tuned": "Members of SBN, tuned",
    "Deep Ensembles + empirical, conditioned, tuned": "Members of empirical, tuned",
}
TEMPERED = " + temperature"
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


@dataclass(frozen=True, eq=False)
class Draws:
    """The draws of one network, or of the members of an ensemble, by part of the data: (S, N, K) log-probabilities."""

    files: tuple[File, ...]

    def average(self, part: str, temperature: float = 1.0) -> Output:
        """Returns the mean of the probabilities, and of the entropies if there are several, over all draws."""
        _, num_inputs, num_classes = self.files[0].tensors[part].shape
        probs = torch.zeros(num_inputs, num_classes, dtype=torch.float64)
        entropy, count = torch.zeros(num_inputs, dtype=torch.float64), 0
        for chunk in (chunk for file in self.files for chunk in file.tensors[part].split(10)):
            each = (chunk.float() / temperature).softmax(2).double()  # (s, N, K)
            probs += each.sum(0)
            entropy += stochbn.entropy(each.flatten(0, 1)).view(len(each), -1).sum(0)
            count += len(each)
        return Output(probs / count, entropy / count if count > 1 else None)

    def choose_temperature(self, labels: Tensor) -> float:
        """Returns the temperature with the lowest NLL on the validation draws."""
        losses = [(t, stochbn.nll(self.average("validation", t).probs, labels).item()) for t in TEMPERATURES]
        return find_minimum(losses)[0]


@dataclass(frozen=True, eq=False)
class Entry:
    """A method of the study.

    Attributes:
        name: As in the tables.
        seeds: Of its networks.
        units: What is scored: each network, or the ensemble.
        replicas: What the ± is the standard deviation over: the same, or the ensembles that leave one member out.
        cost: What a prediction costs, and what has to be trained and kept for it.
    """

    name: str
    seeds: tuple[int, ...]
    units: tuple[Draws, ...]
    replicas: tuple[Draws, ...]
    cost: dict[str, float]

    @property
    def spread(self) -> str:
        """The ± in words."""
        return f"{len(self.replicas)} {'seeds' if self.replicas is self.units else 'ensembles that leave one out'}"


def write_study(study: Study, folder: Path) -> Path:
    """Scores all draws and writes `study.json`, `study.md` and `figures/`; returns the path of the tables."""
    files = {job: File.read(job.path) for job in study.jobs}
    results = measure(study, files)
    write_atomically(folder / "study.json", (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
    text = describe(results)
    write_atomically(folder / "study.md", text.encode())
    for name, figure in draw_figures(results).items():
        for ending, content in render(figure).items():
            write_atomically(folder / "figures" / f"{name}.{ending}", content)
    study.console.print(text, highlight=False, markup=False)
    return folder / "study.md"


def measure(study: Study, files: dict[Job, File]) -> dict[str, Any]:
    """Returns every number of the study."""
    entries = list_entries(study, files)
    validation = study.splits["validation"].labels
    methods: dict[str, Method] = {}
    temperatures, corruptions = {}, {}
    for entry in entries:
        chosen = {unit: unit.choose_temperature(validation) for unit in {*entry.units, *entry.replicas}}
        temperatures[entry.name] = [chosen[unit] for unit in entry.units]
        for suffix in ("", TEMPERED):
            outputs: dict[Draws, dict[str, Output]] = {
                unit: {part: unit.average(part, chosen[unit] if suffix else 1.0) for part in PARTS} for unit in chosen
            }
            own, varied = (tuple(outputs[unit] for unit in units) for units in (entry.units, entry.replicas))
            name = entry.name + suffix
            methods[name] = Method(
                name, entry.seeds, own, own if entry.replicas is entry.units else varied, entry.spread
            )
            if all(part in entry.units[0].files[0].tensors for part in study.corrupted):
                corruptions[name] = _score_corrupted(study, entry, chosen if suffix else dict.fromkeys(chosen, 1.0))
        study.console.print(f"scored {entry.name}", highlight=False)
    scores = score(Results({}, study.splits["test"].labels, methods, True))
    numbers = {
        "experiment": study.experiment.name,
        **provenance(f"stochbn study {study.experiment.name} --samples {study.num_samples}"),
        "num_samples": study.num_samples,
        "num_inputs": {name: len(split) for name, split in (study.splits | study.corrupted).items()},
        "metrics": {metric.key: metric.meaning for metric in METRICS},
        "methods": {
            name: {
                "seeds": method.seeds,
                "std_over": method.spread,
                "scores": {key: asdict(found) for key, found in scores[name].items()},
                "each": [score_outputs(output, study.splits["test"].labels) for output in method.outputs],
            }
            for name, method in methods.items()
        },
        "temperatures": temperatures,
        "tuning": _list_tuning(files),
        "cost": {entry.name: entry.cost for entry in entries},
        "corruptions": corruptions,
        "exact": measure_distances(study, files),
    }
    found: dict[str, Any] = rounded(numbers)
    return found


def list_entries(study: Study, files: dict[Job, File]) -> list[Entry]:
    """Joins networks and ensembles into methods; an ensemble needs two networks."""
    by_name = {
        variant.name: [(job, file) for job, file in files.items() if job.variant == variant] for variant in VARIANTS
    }
    entries = []
    for variant in VARIANTS:
        drawn = by_name[variant.name]
        if drawn and variant.family != "exact" and variant.tuned != "ensemble":
            units = tuple(Draws((file,)) for _, file in drawn)
            entries.append(Entry(variant.name, _seeds(drawn), units, units, _cost(study, drawn[:1])))
    for name, member in ENSEMBLES.items():
        drawn = by_name[member]
        if len(drawn) > 1:
            whole = Draws(tuple(file for _, file in drawn))
            rest = [Draws(whole.files[:i] + whole.files[i + 1 :]) for i in range(len(drawn)) if len(drawn) > 2]
            entries.append(Entry(name, _seeds(drawn), (whole,), tuple(rest) or (whole,), _cost(study, drawn)))
    return entries


def measure_distances(study: Study, files: dict[Job, File]) -> dict[str, dict[str, float]]:
    """Measures how far each method of one network is from exact inference on the same inputs.

    `total_variation` is ½ Σ |p − q| between the predictive means, the mean over inputs and networks, each from S draws;
    "Exact (eq. 3)" itself is one half of its mini-batches against the other, what chance alone makes.
    `entropy_correlation` is Pearson's, over test and out-of-domain inputs together. NLL and AUROC are on the same few
    inputs, for exact inference from all its mini-batches.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for job, file in files.items():
        if job.variant.family != "exact":
            continue
        index = {part: file.tensors[f"{part}/index"] for part in PARTS}
        halves = [
            {part: Draws((File({}, {part: file.tensors[part].chunk(2)[half]}),)).average(part).probs for part in PARTS}
            for half in (0, 1)
        ]
        others = {
            other.variant.name: {part: Draws((drawn,)).average(part).probs[index[part]] for part in PARTS}
            for other, drawn in files.items()
            if (other.recipe, other.seed) == (job.recipe, job.seed)
            and other.variant.family != "exact"
            and other.variant.tuned != "ensemble"
        }
        labels = study.splits["test"].labels[index["test"]]
        whole = {part: (halves[0][part] + halves[1][part]) / 2 for part in PARTS}
        for name, probs in (others | {job.variant.name: halves[0]}).items():
            against = halves[1:] if name == job.variant.name else halves
            row = {
                f"total_variation_{part.replace('-', '_')}": float(
                    np.mean([((probs[part] - half[part]).abs().sum(1) / 2).mean().item() for half in against])
                )
                for part in PARTS
            }
            entropies = [
                np.concatenate([stochbn.entropy(one[part]).numpy() for part in PARTS]) for one in (probs, *against)
            ]
            scored = whole if name == job.variant.name else probs
            row["nll"] = stochbn.nll(scored["test"], labels).item()
            known, strange = (np.asarray(stochbn.entropy(scored[part])) for part in PARTS)
            row["auroc_entropy"] = detect(known, strange)["auroc"]
            row["entropy_correlation"] = float(np.mean([np.corrcoef(entropies[0], e)[0, 1] for e in entropies[1:]]))
            found.setdefault(name, []).append(row)
    return {
        name: {key: float(np.mean([row[key] for row in rows])) for key in rows[0]} | {"num_networks": len(rows)}
        for name, rows in found.items()
    }


def _score_corrupted(study: Study, entry: Entry, temperatures: dict[Draws, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in CORRUPTIONS:
        for strength in STRENGTHS:
            part = f"{kind} {strength}"
            labels = study.corrupted[part].labels
            outputs = [unit.average(part, temperatures[unit]).probs for unit in entry.units]
            found[part] = {
                "nll": float(np.mean([stochbn.nll(probs, labels).item() for probs in outputs])),
                "ece": float(np.mean([stochbn.ece(probs, labels).item() for probs in outputs])),
                "error_percent": float(np.mean([100 * stochbn.error(probs, labels).item() for probs in outputs])),
            }
    return found


def _cost(study: Study, drawn: list[tuple[Job, File]]) -> dict[str, float]:
    checkpoints = [read_checkpoint(checkpoint_path(job.recipe, job.seed)) for job, _ in drawn]
    weights = sum(w.numel() * w.element_size() for checkpoint in checkpoints for w in checkpoint.weights.values())
    return {
        "passes": sum(len(file.tensors["test"]) for _, file in drawn),
        "weights_bytes": weights,
        "statistics_bytes": sum(file.header.get("stats_bytes", 0) for _, file in drawn),
        "train_hours": sum(e["seconds"] for checkpoint in checkpoints for e in checkpoint.history) / 3600,
    }


def _seeds(drawn: list[tuple[Job, File]]) -> tuple[int, ...]:
    return tuple(job.seed for job, _ in drawn)


def _list_tuning(files: dict[Job, File]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for job, file in files.items():
        if file.header.get("tuning"):
            found.setdefault(job.variant.name, []).append({"seed": job.seed, **file.header["tuning"]})
    return found


# ---- words and figures, from the numbers alone


def describe(results: dict[str, Any]) -> str:
    """Returns all tables in Markdown."""
    methods = [name for name in results["methods"] if not name.endswith(TEMPERED)]

    def text(method: str, key: str, digits: int) -> str:
        found = results["methods"][method]["scores"].get(key)
        if found is None:
            return "—"
        return f"{found['value']:.{digits}f}" + ("" if found["std"] is None else f" ± {found['std']:.{digits}f}")

    compared = Grid(
        ["On the first networks alone", "NLL", "ECE, %", "Median entropy, out-of-domain", "AUROC, entropy"],
        [
            [
                f"{name}, seeds {', '.join(map(str, results['methods'][name]['seeds'][:NUM_COMPARED]))}",
                *(f"{factor * _mean_of_first(results, name, key):.{digits}f}" for key, factor, digits in _SOME),
            ]
            for name in methods
            if name not in ENSEMBLES
        ],
    )
    quality = Grid(
        [
            "Method",
            "Networks",
            "Error, %",
            "NLL",
            "with temperature",
            "ECE, %",
            "with temperature",
            "Brier",
            "T",
            "spread",
        ],
        [
            [
                name,
                str(len(results["methods"][name]["seeds"])) + (" together" if name in ENSEMBLES else ""),
                text(name, "error_percent", 2),
                text(name, "nll", 4),
                text(name + TEMPERED, "nll", 4),
                _percent(results, name, "ece"),
                _percent(results, name + TEMPERED, "ece"),
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
        f"Made by `{results['command']}`, commit {results['commit']}, "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + f"; S = {results['num_samples']} draws of each network, seed {results['draw_seed']}.",
        f"n: {num['test']} test, {num['out-of-domain']} out-of-domain, {num['validation']} validation images; "
        f"{num['noise 1']} test images for each corruption and strength.",
        "Networks: the mean over networks scored one by one, ± the standard deviation over them; for an ensemble, over "
        "those that leave one member out. Spreads and temperatures are chosen on validation data, for each network.",
        f"Corruptions: the mean over rotation, noise and blur. Against exact inference: {NUM_EXACT} test and as many "
        "out-of-domain inputs for each of its networks; distances in its own row are what chance makes between two "
        "halves of its mini-batches.",
    ]
    return "\n\n".join([*map(to_markdown, (quality, strange, compared, harder, exact, cost)), *notes]) + "\n"


def _mean_of_first(results: dict[str, Any], name: str, key: str) -> float:
    return float(np.mean([one[key] for one in results["methods"][name]["each"][:NUM_COMPARED]]))


def _percent(results: dict[str, Any], method: str, key: str) -> str:
    found = results["methods"][method]["scores"][key]
    return f"{100 * found['value']:.2f}" + ("" if found["std"] is None else f" ± {100 * found['std']:.2f}")


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
