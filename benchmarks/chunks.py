"""`python -m benchmarks.chunks`: how many examples a stack should hold.

Times `predict` with stacks of 16 to 256 examples, side by side, for each network and several batch sizes. It is what
`CHUNK_ROWS` was chosen by.
"""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import stochbn
from benchmarks.machine import describe
from benchmarks.measure import interleave, ratios, summarise
from benchmarks.subjects import KINDS, Subject
from stochbn.experiments.report.tables import rounded
from stochbn.inference.engine.network import CHUNK_ROWS

STACKS = (16, 32, 64, 128, 256)
ROWS = (1, 16)
NUM_SAMPLES = {1: 256, 16: 16}  # as many as make the largest stack whole
REPEATS = 7


def main() -> None:
    """Measures, prints, and writes `results/chunks.json`."""
    warnings.filterwarnings("ignore", message="The loader does not look like the training data")
    cells: list[dict[str, Any]] = []
    table = Table("network", "N", *(str(stack) for stack in STACKS), title=f"time / time of stacks of {CHUNK_ROWS}")
    for key in ("lenet5", "vgg11", "resnet18"):
        subject = Subject(key)
        for rows in ROWS:
            x = subject.images(rows)
            predict = partial(
                stochbn.predict, subject.model, subject.stats, x, num_samples=NUM_SAMPLES[rows], keep_samples=False
            )
            # A chunk of one draw would ask for the loop.
            runs = {str(stack): partial(predict, chunk_size=stack // rows) for stack in STACKS if stack > rows}
            times = interleave(runs, REPEATS)
            found = {name: summarise(ratios(values, times[str(CHUNK_ROWS)])) for name, values in times.items()}
            cells.append({"network": key, "rows": rows, "times": times, "ratio": found})
            table.add_row(
                KINDS[key].name, str(rows), *(f"{found[str(s)]['median']:.2f}" if s > rows else "—" for s in STACKS)
            )
    Console(width=120).print(table)
    results = describe("python -m benchmarks.chunks") | {"cells": cells}
    Path("results/chunks.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
