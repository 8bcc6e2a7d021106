"""`python -m benchmarks.dropout`: why LeNet-5's Dropout rows differ from the paper's.

For networks with dropout of several strengths (`stochbn train lenet5-dropout [--dropout P]`), test error, NLL and the
median out-of-domain entropy; and the NLL after a temperature that is chosen on validation data, which distinguishes
wrong confidence from wrong answers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import stochbn
from benchmarks.machine import describe
from stochbn.experiments.data.splits import load_split
from stochbn.experiments.evaluation.inference import input_batches
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.training.checkpoints import checkpoint_path, load_network, read_checkpoint
from stochbn.experiments.training.recipes import RECIPES, Recipe

NUM_SAMPLES = 50
STRONG = RECIPES["lenet5-dropout"]
RUNS: list[tuple[Recipe, int]] = [(STRONG, 0), (STRONG, 1), (STRONG, 2), (STRONG.vary(dropout=0.25), 0)]
TEMPERATURES = [0.3 + 0.05 * step for step in range(25)]


def main() -> None:
    """Measures what is trained, prints, and writes `results/lenet5/dropout.json`."""
    console = Console(width=130)
    splits = {part: load_split("mnist", part) for part in ("validation", "test", "out-of-domain")}
    rows: list[dict[str, Any]] = []
    for recipe, seed in RUNS:
        path = checkpoint_path(recipe, seed)
        if not path.exists() or not read_checkpoint(path).finished:
            console.print(f"{recipe.name} seed {seed}: not trained, left out")
            continue
        network = load_network(path)
        found = {
            part: stochbn.predict(
                network, None, input_batches(split), num_samples=NUM_SAMPLES, dropout=True, keep_samples=False
            )
            for part, split in splits.items()
        }
        temperature = choose_temperature(found["validation"].probs, splits["validation"].labels)
        probs, labels = found["test"].probs, splits["test"].labels
        rows.append(
            {
                "recipe": recipe.name,
                "dropout": recipe.dropout,
                "seed": seed,
                "error_percent": 100 * stochbn.error(probs, labels).item(),
                "nll": stochbn.nll(probs, labels).item(),
                "confidence": probs.amax(1).double().mean().item(),
                "temperature": temperature,
                "nll_at_temperature": stochbn.nll(heat(probs, temperature), labels).item(),
                "median_entropy_out_of_domain": found["out-of-domain"].entropy.median().item(),
            }
        )
        console.print(rows[-1])
    table = Table(*rows[0], title=f"Dropout, {NUM_SAMPLES} draws, n = 10,000")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    results = describe("python -m benchmarks.dropout") | {"num_samples": NUM_SAMPLES, "rows": rows}
    Path("results/lenet5/dropout.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def heat(probs: Tensor, temperature: float) -> Tensor:
    """Raises probabilities to the power 1 / temperature: below 1 they grow more confident."""
    return (probs.clamp_min(torch.finfo(probs.dtype).tiny).log() / temperature).softmax(1)


def choose_temperature(probs: Tensor, labels: Tensor) -> float:
    """Returns the temperature with the lowest NLL."""
    return min(TEMPERATURES, key=lambda temperature: stochbn.nll(heat(probs, temperature), labels).item())


if __name__ == "__main__":
    main()
