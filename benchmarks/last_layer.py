"""`python -m benchmarks.last_layer`: what all kept mini-batches cost when they are drawn in the last layer alone.

Times 256 draws of `family="empirical", conditioned=True` in the last BatchNorm layer, and six networks, side by side,
in units of one plain pass. What comes before that layer is computed once for all draws.
"""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import stochbn
from benchmarks.machine import describe
from benchmarks.measure import interleave, ratios, summarise
from benchmarks.subjects import KINDS, Subject
from stochbn.experiments.report.tables import rounded
from stochbn.statistics.layers import all_batch_norms

ROWS = (1, 16, 128)
NUM_SAMPLES = 256
REPEATS = 7


def main() -> None:
    """Measures, prints, and writes `results/last-layer.json`."""
    warnings.filterwarnings("ignore", message="The loader does not look like the training data")
    cells: list[dict[str, Any]] = []
    for key in ("lenet5", "vgg11", "resnet18"):
        subject = Subject(key)
        stats = fit_last(subject)
        for rows in ROWS:
            times = interleave(contenders(subject, stats, rows), REPEATS)
            found = {name: summarise(ratios(values, times["one plain pass"])) for name, values in times.items()}
            cells.append({"network": key, "rows": rows, "times": times, "ratio": found})
    table = Table("network", "N", *list(cells[0]["ratio"])[1:], title="time / time of one plain pass")
    for cell in cells:
        table.add_row(
            KINDS[cell["network"]].name,
            str(cell["rows"]),
            *(f"{found['median']:.1f}" for found in list(cell["ratio"].values())[1:]),
        )
    Console(width=120).print(table)
    results = describe("python -m benchmarks.last_layer") | {"num_samples": NUM_SAMPLES, "cells": cells}
    Path("results/last-layer.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def fit_last(subject: Subject) -> stochbn.Distribution:
    """Fits the last BatchNorm layer on as many mini-batches as there are draws."""
    return stochbn.fit(
        subject.model,
        [subject.images(subject.kind.batch_size) for _ in range(NUM_SAMPLES)],
        layers=list(all_batch_norms(subject.model))[-1:],
        family="empirical",
        conditioned=True,
        progress=False,
    )


def contenders(subject: Subject, stats: stochbn.Distribution, rows: int) -> dict[str, Any]:
    """Returns what is timed, on a batch of so many rows."""
    x = subject.images(rows)
    predict = partial(stochbn.predict, num_samples=NUM_SAMPLES, keep_samples=False)

    @torch.inference_mode()
    def plain() -> None:
        subject.model(x).softmax(1)

    return {
        "one plain pass": plain,
        "six networks": partial(predict, subject.members, None, x),
        "last layer": partial(predict, subject.model, stats, x),
        "last layer, compiled": partial(predict, subject.model, stats, x, compile=True),
    }


if __name__ == "__main__":
    main()
