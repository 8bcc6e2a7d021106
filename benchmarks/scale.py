"""`python -m benchmarks.scale`: what a second process gains, and what the two send each other.

A narrow VGG-11 with random weights is fitted, and predicts, with one process and with two, one thread each. The
processes of both jobs stay alive and take turns, so that a round has them side by side. Afterwards Ray predicts four
times as much with one actor and with two, if it is installed. Run it on an idle machine with two cores at least.
"""

import argparse
import importlib.util
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import stochbn
from benchmarks.machine import describe
from benchmarks.measure import ratios, summarise
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.training.networks import vgg11

SIZES = (1, 2)  # processes
TASKS = ("fit", "fit, empirical", "predict")


@dataclass(frozen=True)
class Work:
    """How much there is to do."""

    width: float = 0.25
    num_batches: int = 64  # of the loader, of which each process takes its slice
    batch_size: int = 64
    mini_batch_size: int = 16
    num_samples: int = 8
    repeats: int = 5


def main() -> None:
    """Measures, prints, and writes `results/scale.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, help="Of a process of a job, which this one starts.")
    parser.add_argument("--job", nargs=3, help="Its size, its file to meet at, and the work.")
    given = parser.parse_args()
    if given.job:
        serve(given.rank, int(given.job[0]), given.job[1], Work(**json.loads(given.job[2])))
        return
    work = Work()
    rows = measure(work) + ray_rows(work)
    table = Table("engine", "task", "processes", "seconds", "speed-up", "efficiency", "bytes sent")
    for row in rows:
        seconds, speed_up = (f"{row[key]['median']:.3f}" for key in ("seconds", "speed_up"))
        values = (row["engine"], row["task"], str(row["processes"]), seconds, speed_up)
        table.add_row(*values, f"{row['efficiency']:.0%}", f"{row['bytes_sent']:,}")
    Console(width=120).print(table)
    results = describe("python -m benchmarks.scale") | {"work": asdict(work), "rows": rows}
    Path("results/scale.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def ray_rows(work: Work) -> list[dict[str, Any]]:
    """Returns the rows of Ray, none where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        return []
    from benchmarks.scale_ray import measure_ray

    num_batches = 4 * work.num_batches  # actors take seconds to start; with less work that is all one sees
    return measure_ray(
        num_batches=num_batches, batch_size=work.batch_size, num_samples=work.num_samples, repeats=work.repeats
    )


def measure(work: Work) -> list[dict[str, Any]]:
    """Has the jobs take turns at each task, and returns a row for each task and size."""
    times: dict[tuple[str, int], list[float]] = {(task, size): [] for task in TASKS for size in SIZES}
    num_bytes: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {size: start(size, Path(folder), work) for size in SIZES}
        try:
            for turn in range(work.repeats + 1):  # the first one warms up
                for task, size in times:
                    seconds, num_bytes[task, size] = ask(jobs[size], task)
                    times[task, size] += [seconds] if turn else []
        finally:
            for process in (process for job in jobs.values() for process in job):
                process.kill()
                process.communicate()
    rows = []
    for (task, size), seconds_ in times.items():
        gains = ratios(times[task, SIZES[0]], seconds_)
        row: dict[str, Any] = {
            "engine": "torch.distributed, gloo" if size > 1 else "none",
            "task": task,
            "processes": size,
        }
        row |= {"seconds": summarise(seconds_), "speed_up": summarise(gains)}
        rows.append(row | {"efficiency": statistics.median(gains) / size, "bytes_sent": num_bytes[task, size]})
    return rows


def start(size: int, folder: Path, work: Work) -> list["subprocess.Popen[str]"]:
    """Starts the processes of a job, which then wait for tasks."""
    job = [str(size), str(folder / f"store{size}"), json.dumps(asdict(work))]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale", "--rank", str(rank), "--job", *job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]


def ask(job: list["subprocess.Popen[str]"], task: str) -> tuple[float, int]:
    """Has a job do a task; returns how long its slowest process took, and how many bytes all of them sent."""
    for process in job:
        assert process.stdin is not None
        process.stdin.write(f"{task}\n")
        process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for process in job if process.stdout is not None]
    return max(seconds for seconds, _ in answers), sum(sent for _, sent in answers)


def serve(rank: int, size: int, store: str, work: Work) -> None:
    """Is what a process of a job does: it reads tasks line by line, and answers each with seconds and bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if size > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    model = vgg11(5, 3, width=work.width).eval()
    batches = [torch.rand(work.batch_size, 3, 32, 32) for _ in range(work.num_batches)]
    stats = stochbn.fit(model, batches[:2], batch_size=work.mini_batch_size, progress=False)
    tasks = make_tasks(model, stats, batches, work, is_job=size > 1)
    for line in sys.stdin:
        with counting_bytes() as sent:
            begin = time.perf_counter()
            tasks[line.strip()]()
            seconds = time.perf_counter() - begin
        print(json.dumps([seconds, sum(sent)]), flush=True)


def make_tasks(model: Any, stats: Any, batches: list[Any], work: Work, *, is_job: bool) -> dict[str, Callable[[], Any]]:
    """Returns the tasks by name, for one process or for those of a job."""
    options: dict[str, Any] = {"batch_size": work.mini_batch_size, "progress": False}

    def fit(family: Any) -> Any:
        if is_job:
            return stochbn.distributed.fit(model, stochbn.distributed.shard(batches), family=family, **options)
        return stochbn.fit(model, batches, family=family, **options)

    def predict() -> Any:
        options: dict[str, Any] = {"num_samples": work.num_samples, "keep_samples": False}
        if is_job:
            return stochbn.distributed.predict(model, stats, batches, **options)
        return stochbn.predict(model, stats, batches, **options)

    return dict(zip(TASKS, (lambda: fit("factorized"), lambda: fit("empirical"), predict), strict=True))


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Notes the size of each object that this process sends to another; what goes to all counts once for each."""
    sent: list[int] = []
    others = dist.get_world_size() - 1 if dist.is_initialized() else 0
    kept = {name: getattr(dist, name) for name in ("all_gather_object", "send_object_list", "broadcast_object_list")}

    def all_gather_object(found: list[Any], value: Any, *args: Any, **options: Any) -> None:
        sent.append(others * len(pickle.dumps(value)))
        kept["all_gather_object"](found, value, *args, **options)

    def send_object_list(values: list[Any], *args: Any, **options: Any) -> None:
        sent.append(len(pickle.dumps(values[0])))
        kept["send_object_list"](values, *args, **options)

    def broadcast_object_list(values: list[Any], *args: Any, **options: Any) -> None:
        is_source = dist.get_rank() == options["src"]
        sent.append(others * len(pickle.dumps(values[0])) * is_source)
        kept["broadcast_object_list"](values, *args, **options)

    counters = {"all_gather_object": all_gather_object, "send_object_list": send_object_list}
    try:
        for name, counter in (counters | {"broadcast_object_list": broadcast_object_list}).items():
            setattr(dist, name, counter)
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


if __name__ == "__main__":
    main()
