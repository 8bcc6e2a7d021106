"""`python -m benchmarks.draws`: how many draws, of which kind and in which layers, for how good an answer.

On the first LeNet-5 of the reproduction (`stochbn train lenet5`), with MNIST and notMNIST: the error of predictive
probabilities and entropy against S for several ways to draw; what adaptive sampling takes and gives; and what the last
layers alone keep of the uncertainty, at what cost.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

import stochbn
from benchmarks.machine import describe
from stochbn.distributions import factorized
from stochbn.distributions.seeds import antithetic_normal, derive_seed
from stochbn.experiments.data.splits import Split, load_split, to_inputs
from stochbn.experiments.evaluation.diagnostics import choose_rows
from stochbn.experiments.evaluation.inference import fit, input_batches
from stochbn.experiments.methods import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from stochbn.experiments.report.scores import detect
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.training.checkpoints import checkpoint_path, load_network
from stochbn.experiments.training.recipes import RECIPES
from stochbn.pages.figures import FULL, STYLE, render

SIZES = (2, 4, 8, 16, 32, 64, 128)
REPEATS = 10
NUM_INPUTS = 200  # of each set
NUM_OUT_OF_DOMAIN = 2000  # images for adaptive sampling
REFERENCE = 2000
TOLERANCES = (0.1, 0.02)  # the default, and a finer one
RECIPE = RECIPES["lenet5"]

Scheme = Callable[[int, int, int, int], Tensor]


def independent(seed: int, first: int, count: int, size: int) -> Tensor:
    """Independent draws: one of each antithetic pair."""
    return antithetic_normal(seed, 2 * first, 2 * count, size)[::2]


def sobol(seed: int, first: int, count: int, size: int) -> Tensor:
    """Scrambled Sobol points, a dimension for each number of a draw."""
    engine = SobolEngine(size, scramble=True, seed=seed % 2**31).fast_forward(first)
    return _normal(engine.draw(count, dtype=torch.float64))


def antithetic_sobol(seed: int, first: int, count: int, size: int) -> Tensor:
    """Scrambled Sobol points, each followed by its mirror image."""
    points = sobol(seed, first // 2, (count + 1) // 2, size)
    return torch.stack([points, -points], dim=1).flatten(0, 1)[:count]


def latin_hypercube(seed: int, first: int, count: int, size: int) -> Tensor:
    """One point in each of S slices of every dimension; S must be known in advance."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "latin", first))
    slices = torch.rand(count, size, generator=generator).argsort(dim=0)
    return _normal((slices + torch.rand(count, size, generator=generator, dtype=torch.float64)) / count)


SCHEMES: dict[str, tuple[Scheme, dict[str, Any]]] = {
    "independent": (independent, {"color": BLUE, "marker": "o"}),
    "antithetic": (antithetic_normal, {"color": GREEN, "marker": "s", "linewidth": 2}),
    "Sobol": (sobol, {"color": VERMILION, "marker": "^"}),
    "antithetic Sobol": (antithetic_sobol, {"color": ORANGE, "marker": "v"}),
    "Latin hypercube": (latin_hypercube, {"color": PURPLE, "marker": "D"}),
}


def main() -> None:
    """Measures, prints, and writes `results/draws.json` and the figure."""
    console = Console(width=130)
    network = load_network(checkpoint_path(RECIPE, 0))
    splits = {
        name: load_split("mnist", "test") if name == "test" else load_split("notmnist", "test")
        for name in ("test", "out of domain")
    }
    training = load_split("mnist", "train")
    stats = fit(network, training, RECIPE)
    results: dict[str, Any] = describe("python -m benchmarks.draws")
    console.print("error against S …")
    results["schemes"] = compare_schemes(network, stats, splits)
    console.print("adaptive sampling …")
    results["adaptive"] = measure_adaptive(network, stats, splits)
    console.print("the last layers …")
    results["layers"] = measure_layers(network, training, splits)
    show(console, results)
    folder = Path("results")
    (folder / "draws.json").write_text(json.dumps(rounded(results), indent=1) + "\n")
    for ending, content in render(draw(results)).items():
        (folder / f"draws.{ending}").write_bytes(content)
    console.print("wrote results/draws.json, results/draws.png, results/draws.svg")


def compare_schemes(network: nn.Module, stats: stochbn.Distribution, splits: dict[str, Split]) -> list[dict[str, Any]]:
    """Measures the root mean square error of probabilities and entropy, against many independent draws."""
    found = []
    for part, split in splits.items():
        x = to_inputs(split.images[choose_rows(split, NUM_INPUTS)])
        truth = stochbn.predict(network, sample(stats, independent, REFERENCE, seed=-1), x, keep_samples=False)
        for name, (scheme, _) in SCHEMES.items():
            for size in SIZES:
                trials = [
                    stochbn.predict(network, sample(stats, scheme, size, seed=trial), x, keep_samples=False)
                    for trial in range(REPEATS)
                ]
                errors = [
                    [
                        _rms(trial.probs - truth.probs) * math.sqrt(truth.probs.shape[1]),
                        _rms(trial.entropy - truth.entropy),
                    ]
                    for trial in trials
                ]
                probs, entropy = torch.tensor(errors).square().mean(0).sqrt().tolist()
                found.append({"part": part, "scheme": name, "S": size, "probs": probs, "entropy": entropy})
    return found


def measure_adaptive(network: nn.Module, stats: stochbn.Distribution, splits: dict[str, Split]) -> list[dict[str, Any]]:
    """Compares `num_samples="auto"` with 1,000 draws of another seed, on all test and some out-of-domain images."""
    found = []
    for part, split in splits.items():
        if part != "test":
            split = split[choose_rows(split, NUM_OUT_OF_DOMAIN)]
        batches = input_batches(split)
        fixed = stochbn.predict(network, stats, batches, num_samples=1000, seed=1, keep_samples=False, compile=True)
        for tolerance in TOLERANCES:
            adaptive = stochbn.predict(network, stats, batches, num_samples="auto", tolerance=tolerance)
            counts = adaptive.counts
            assert counts is not None
            change = (adaptive.entropy - fixed.entropy).abs()
            found.append(
                {
                    "part": part,
                    "n": len(adaptive),
                    "tolerance": tolerance,
                    "mean_draws": counts.double().mean().item(),
                    "draws": {str(count): int((counts == count).sum()) for count in counts.unique().tolist()},
                    "same_class": (adaptive.probs.argmax(1) == fixed.probs.argmax(1)).double().mean().item(),
                    "within_tolerance": (change <= tolerance).double().mean().item(),
                }
            )
    return found


def measure_layers(network: nn.Module, training: Split, splits: dict[str, Split]) -> list[dict[str, Any]]:
    """Measures what SBN in the last layers alone keeps, and its time against all layers, side by side."""
    names = ["conv1.norm", "conv2.norm", "fc.norm"]
    choices: list[list[str]] = [[], names[2:], names[1:], names]
    fits = [fit(network, training, RECIPE, layers=layers) if layers else None for layers in choices]
    x = to_inputs(splits["test"].images[:16])
    times: list[list[float]] = [[] for _ in choices]
    for _ in range(15):
        for layers_stats, column in zip(fits, times, strict=True):
            start = time.perf_counter()
            stochbn.predict(network, layers_stats, x, keep_samples=False)
            column.append(time.perf_counter() - start)
    found = []
    for layers, layers_stats, column in zip(choices, fits, times, strict=True):
        known, unknown = (
            stochbn.predict(network, layers_stats, input_batches(split), keep_samples=False)
            for split in splits.values()
        )
        found.append(
            {
                "layers": layers,
                "nll": stochbn.nll(known.probs, splits["test"].labels).item(),
                "error_percent": 100 * stochbn.error(known.probs, splits["test"].labels).item(),
                "auroc": detect(known.entropy.double().numpy(), unknown.entropy.double().numpy())["auroc"],
                "median_entropy_out_of_domain": unknown.entropy.median().item(),
                "time_ratio": median(a / b for a, b in zip(column, times[-1], strict=True)),
            }
        )
    return found


def sample(stats: stochbn.Distribution, scheme: Scheme, size: int, seed: int) -> stochbn.Draws:
    """Draws networks with noise from a scheme."""
    with patch.object(factorized, "antithetic_normal", scheme):
        return stats.sample(size, seed=seed)


def show(console: Console, results: dict[str, Any]) -> None:
    """Prints what was measured."""
    for part in dict.fromkeys(row["part"] for row in results["schemes"]):
        table = Table("S", *SCHEMES, title=f"RMS error of the probabilities; of the entropy. {part}, n = {NUM_INPUTS}")
        for size in SIZES:
            rows = [row for row in results["schemes"] if (row["part"], row["S"]) == (part, size)]
            table.add_row(str(size), *(f"{row['probs']:.4f}; {row['entropy']:.4f}" for row in rows))
        console.print(table)
    console.print(results["adaptive"])
    console.print(results["layers"])


@matplotlib.rc_context(STYLE)
def draw(results: dict[str, Any]) -> Figure:
    """Draws the error of the entropy against S for each set, by scheme."""
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    parts = list(dict.fromkeys(row["part"] for row in results["schemes"]))
    for axes, part in zip(figure.subplots(1, len(parts)), parts, strict=True):
        for name, (_, look) in SCHEMES.items():
            rows = [row for row in results["schemes"] if (row["part"], row["scheme"]) == (part, name)]
            axes.loglog([row["S"] for row in rows], [row["entropy"] for row in rows], label=name, **look)
        axes.set_title({"test": "MNIST", "out of domain": "notMNIST"}[part])
        axes.set_xlabel("Draws S")
        axes.set_xticks(SIZES, [str(size) for size in SIZES], minor=False)
        axes.minorticks_off()
    figure.axes[0].set_ylabel("RMS error of the entropy, nats")
    figure.axes[0].legend()
    return figure


def _normal(uniform: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv((2 * uniform - 1).clamp(-1 + 1e-12, 1 - 1e-12))


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


if __name__ == "__main__":
    main()
