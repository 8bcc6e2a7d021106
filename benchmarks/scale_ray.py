"""What a second actor gains when Ray predicts, and what goes through its memory: rows of `python -m benchmarks.scale`.

A narrow VGG-11 with random weights predicts with one actor and with two, one thread each, on a cluster that is started
for it. The time is that of a whole call, as a user waits for it: it includes the start of the actors, which is reported
beside it.
"""

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stochbn
from benchmarks.measure import ratios, summarise
from stochbn.cli.ray import PREDICTING
from stochbn.experiments.training.networks import vgg11
from stochbn.ray import BatchPredictor

SIZES = (1, 2)  # actors
WIDTH = 0.25


def measure_ray(
    *, num_batches: int = 64, batch_size: int = 64, num_samples: int = 8, repeats: int = 5
) -> list[dict[str, Any]]:
    """Has one and two actors take turns, and returns a row for each; `start` is how long the first batch takes."""
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    starts: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as folder, _cluster():
        options = _write_network(Path(folder), batch_size, num_samples)
        inputs = [np.random.default_rng(0).random((batch_size, 3, 32, 32), np.float32) for _ in range(num_batches)]
        for turn in range(repeats + 1):  # the first one warms up
            for size in SIZES:
                seconds, start, num_bytes = _predict(inputs, size, batch_size, options)
                times[size] += [seconds] if turn else []
                starts[size] += [start] if turn else []
    rows = []
    for size in SIZES:
        gains = ratios(times[SIZES[0]], times[size])
        row: dict[str, Any] = {"engine": "Ray Data", "task": "predict", "processes": size}
        row |= {"seconds": summarise(times[size]), "start": summarise(starts[size]), "speed_up": summarise(gains)}
        rows.append(row | {"efficiency": statistics.median(gains) / size, "bytes_sent": num_bytes})
    return rows


def build() -> torch.nn.Module:
    """Builds the network."""
    torch.manual_seed(0)
    return vgg11(5, 3, width=WIDTH).eval()


def _write_network(folder: Path, batch_size: int, num_samples: int) -> dict[str, Any]:
    model = build()
    torch.save(model.state_dict(), folder / "net.pt")
    batches = [torch.rand(batch_size, 3, 32, 32) for _ in range(2)]
    stochbn.fit(model, batches, batch_size=16, progress=False).save(folder / "net.sbn.safetensors")
    files = {"checkpoint": folder / "net.pt", "stats": folder / "net.sbn.safetensors"}
    return {"factory": build, **files, "column": "data", "num_samples": num_samples}


@contextmanager
def _cluster() -> Iterator[None]:
    # One thread an actor; and no politeness, or whatever else runs would be measured.
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    import ray
    from ray.data import DataContext

    ray.init("local", num_cpus=max(SIZES), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


def _predict(inputs: list[np.ndarray], size: int, batch_size: int, options: dict[str, Any]) -> tuple[float, float, int]:
    """Predicts; returns seconds, those until the first batch was there, and the bytes of inputs and predictions."""
    from ray import data

    rows = data.from_numpy(inputs)
    begin = time.perf_counter()
    start, num_bytes = 0.0, sum(batch.nbytes for batch in inputs)
    predicted = rows.map_batches(
        BatchPredictor,
        fn_constructor_kwargs=options,
        batch_size=batch_size,
        batch_format="numpy",
        compute=data.ActorPoolStrategy(size=size),
        num_cpus=PREDICTING,
    )
    for batch in predicted.iter_batches(batch_size=None, batch_format="numpy"):
        start = start or time.perf_counter() - begin
        num_bytes += sum(values.nbytes for values in batch.values())
    return time.perf_counter() - begin, start, num_bytes
