"""`python -m benchmarks.last_layer`: what all kept mini-batches cost when they are drawn in the last layer alone.

Times 256 draws of `family="empirical", conditioned=True` in the last BatchNorm layer, and six networks, side by side,
in units of one plain pass. What comes before that layer is computed once for all draws. Then the latency of single
inputs, one after the other, through a `Predictor` and through the plain network.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import stochbn
from benchmarks.machine import describe
from benchmarks.measure import interleave, ratios, summarise
from benchmarks.subjects import KINDS, NUM_MINI_BATCHES, Subject
from stochbn.experiments.report.tables import rounded

ROWS = (1, 16, 128)
REPEATS = 7
NUM_CALLS = 2000  # of the latency
# Time over that of one plain pass, by network and N: as it comes, and compiled or exported.
TARGETS = {
    "lenet5": {1: (3.0, 1.5), 16: (3.0, 1.5), 128: (3.0, 2.0)},
    "vgg11": {1: (1.5, 1.5), 16: (1.25, 1.25), 128: (1.25, 1.25)},
    "resnet18": {1: (1.5, 1.5), 16: (1.4, 1.4), 128: (1.4, 1.4)},
}


def main() -> None:
    """Measures, prints, and writes `results/last-layer.json`."""
    cells: list[dict[str, Any]] = []
    latencies: list[dict[str, Any]] = []
    for key in TARGETS:
        subject = Subject(key)
        latencies.append({"network": key} | latency(subject))
        for rows in ROWS:
            times = interleave(contenders(subject, rows), REPEATS)
            found = {name: summarise(ratios(values, times["one plain pass"])) for name, values in times.items()}
            cells.append({"network": key, "rows": rows, "times": times, "ratio": found})
    table = Table("network", "N", *list(cells[0]["ratio"])[1:], title="time / time of one plain pass")
    for cell in cells:
        table.add_row(
            KINDS[cell["network"]].name,
            str(cell["rows"]),
            *(f"{found['median']:.1f}" for found in list(cell["ratio"].values())[1:]),
        )
    console = Console(width=120)
    console.print(table)
    single = Table("network", "median", "99th percentile", "plain, median", title="milliseconds for one input")
    for case in latencies:
        values = (case["predictor"]["median"], case["predictor"]["p99"], case["plain"]["median"])
        single.add_row(KINDS[case["network"]].name, *(f"{1e3 * value:.2f}" for value in values))
    console.print(single)
    results = describe("python -m benchmarks.last_layer")
    results |= {"num_samples": NUM_MINI_BATCHES, "targets": TARGETS, "cells": cells, "latency_seconds": latencies}
    Path("results/last-layer.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def contenders(subject: Subject, rows: int) -> dict[str, Any]:
    """Returns what is timed, on a batch of so many rows."""
    x, stats = subject.images(rows), subject.last_layer
    options: dict[str, Any] = {"num_samples": NUM_MINI_BATCHES, "keep_samples": False}
    session = subject.session(NUM_MINI_BATCHES, only_last=True)

    @torch.inference_mode()
    def plain() -> None:
        subject.model(x).softmax(1)

    return {
        "one plain pass": plain,
        "six networks": partial(stochbn.Predictor(subject.members, None, keep_samples=False), x),
        "predict": partial(stochbn.predict, subject.model, stats, x, **options),
        "Predictor": partial(stochbn.Predictor(subject.model, stats, **options), x),
        "Predictor, compiled": partial(stochbn.Predictor(subject.model, stats, compile=True, **options), x),
        "ONNX Runtime": partial(session.run, None, {"input": x.numpy()}),
    }


def latency(subject: Subject) -> dict[str, Any]:
    """Times single inputs one after the other, the two ways in turn."""
    inputs = subject.images(64).split(1)
    predictor = stochbn.Predictor(
        subject.model, subject.last_layer, num_samples=NUM_MINI_BATCHES, keep_samples=False
    ).warm_up(inputs[0])
    ways: dict[str, Callable[[Tensor], Any]] = {"predictor": predictor, "plain": subject.model}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for number in range(NUM_CALLS):
            for name, way in ways.items():
                start = time.perf_counter()
                way(inputs[number % len(inputs)])
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "calls": len(values)}
        for name, values in seconds.items()
    }


if __name__ == "__main__":
    main()
