"""`python -m benchmarks.ablation`: what each mechanism of the engine is worth.

Each is switched off alone, by a patch, and timed beside the whole engine. A mechanism that gains nothing should go.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

import stochbn
from benchmarks.machine import describe
from benchmarks.measure import interleave, ratios, summarise
from benchmarks.subjects import KINDS, NUM_MINI_BATCHES, Subject
from stochbn.experiments.report.tables import rounded
from stochbn.inference.engine import folding, network
from stochbn.inference.engine.captured import Captured, CaptureError
from stochbn.inference.engine.network import Network

ROWS = (1, 16)
NUM_SAMPLES = {1: 50, 16: 16}  # in all layers
REPEATS = 7
WHOLE = "the whole engine"

Patch = tuple[Any, str, Any]


def _refuse(*_: Any, **__: Any) -> Any:
    raise CaptureError("it was switched off")


def _share_nothing(self: Network, captured: Captured, item: Any, *rest: Any) -> Iterator[Any]:
    """Runs every chunk as if nothing were shared: what stands before the first drawn layer again for each draw."""
    tensors = self._tensors_of(captured, item)
    for _ in range(self.num_draws - 1):
        captured.share(tensors, len(item))
    yield from _RUN_CAPTURED(self, captured, item, *rest)


def _leave_weights(self: Network, captured: Captured) -> Any:
    return _MODEL_TENSORS(self, replace(captured, convolution_weights=frozenset()))


_RUN_CAPTURED, _MODEL_TENSORS = Network._run_captured, Network._model_tensors
# What is patched to switch a mechanism off: an object, its attribute, and what stands in for it.
PATCHES: dict[str, list[Patch]] = {
    WHOLE: [],
    "no cut: all of it for each draw": [(Network, "_run_captured", _share_nothing)],
    "no capture: stacked by vmap on a twin": [(network, "capture", _refuse)],
    "weights as the model has them": [(Network, "_model_tensors", _leave_weights)],
    "ReLU writes elsewhere": [(folding, "_write_over_activations", lambda graph: None)],
    "pooling after the draws": [(folding.Folding, "_move_pool", lambda self, node: None)],
    "shortcuts repeated": [(folding.Folding, "_add_shared", lambda self, node: False)],
    "maps made at each call": [(network, "KEPT_NUMBERS", 0)],
    "chunks of 16 rows": [(network, "CHUNK_ROWS", 16), (network, "CHUNK_BYTES", 1)],
    "chunks of 64 rows": [(network, "CHUNK_BYTES", 1)],
    "chunks of 256 rows": [(network, "CHUNK_ROWS", 256), (network, "CHUNK_BYTES", 1)],
    "all draws at once": [(network, "CHUNK_BYTES", 2**40)],
}


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Has other things in place of some."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def contenders(subject: Subject, rows: int, *, only_last: bool) -> dict[str, Callable[[], Any]]:
    """Returns a run of every variant, on a batch of so many rows, each with a predictor of its own."""
    x = subject.images(rows)
    stats = subject.last_layer if only_last else subject.stats
    num_samples = NUM_MINI_BATCHES if only_last else NUM_SAMPLES[rows]

    def prepare(patches: list[Patch]) -> Callable[[], Any]:
        with patched(patches):
            predictor = stochbn.Predictor(subject.model, stats, num_samples=num_samples, keep_samples=False).warm_up(x)

        def run() -> Any:
            with patched(patches):
                return predictor(x)

        return run

    return {name: prepare(patches) for name, patches in PATCHES.items()}


def main() -> None:
    """Measures, prints, and writes `results/ablation.json`."""
    cells: list[dict[str, Any]] = []
    for key in ("lenet5", "vgg11", "resnet18"):
        subject = Subject(key)
        for only_last in (False, True):
            for rows in ROWS:
                times = interleave(contenders(subject, rows, only_last=only_last), REPEATS)
                ratio = {name: summarise(ratios(values, times[WHOLE])) for name, values in times.items()}
                drawn = "last layer" if only_last else "all layers"
                cells.append({"network": key, "drawn": drawn, "rows": rows, "times": times, "ratio": ratio})
    heads = [f"{KINDS[cell['network']].name}\n{cell['drawn']}\nN = {cell['rows']}" for cell in cells]
    table = Table("", *heads, title="time without it / time of the whole engine")
    for name in list(PATCHES)[1:]:
        table.add_row(name, *(f"{cell['ratio'][name]['median']:.2f}" for cell in cells))
    Console(width=200).print(table)
    results = describe("python -m benchmarks.ablation")
    results |= {"num_samples": {"all layers": NUM_SAMPLES, "last layer": NUM_MINI_BATCHES}, "cells": cells}
    Path("results/ablation.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
