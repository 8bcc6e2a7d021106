"""`--ray`: predictions of a data set of any size, and an experiment's networks, on a Ray cluster.

Ray is imported when it is used, as nothing else needs it.
"""

import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from stochbn.cli.loading import load_model
from stochbn.distributions.storage import brief
from stochbn.ray import BatchPredictor
from stochbn.statistics.checks import listing

if TYPE_CHECKING:
    from stochbn.experiments.evaluation.plan import Run
    from stochbn.experiments.evaluation.queue import Maker

PATIENCE = 5.0  # seconds in which a cluster has to answer
LOOKS = 10.0  # seconds between two looks at a network that another process is at work on
RETRIES = 20  # of a network whose worker dies; each goes on where the last one was, so it may happen often
# Shares of a core: an actor that predicts leaves room for the task that reads for it, or a single core would wait for
# itself. Processes have a thread each all the same.
PREDICTING, READING = 0.75, 0.25
MODES = {1: "L", 4: "RGBA"}  # that images are converted to, by the channels that a network takes; else RGB
IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@contextmanager
def connected(address: str, *, logs: bool = False) -> Iterator[None]:
    """Connects to a cluster, `host:port`, or starts one on this machine for an empty address, and leaves it again.

    Args:
        address: Where the cluster is. The environment's `RAY_ADDRESS` takes the place of an empty one.
        logs: Whether what workers print is printed here.

    Raises:
        ValueError: No cluster answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere that nobody asked for
    import ray

    address = address or os.environ.get("RAY_ADDRESS", "local")
    try:
        if address not in ("auto", "local") and os.environ.get("RAY_USE_TLS", "0") == "0":
            _knock(address)
        ray.init(address, include_dashboard=False, log_to_driver=logs, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"Expected a Ray cluster at {address!r}, got none that answers ({brief(error)}). Name one as host:port, or "
            "leave the address out to start one here."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises unless a server of gRPC answers, as Ray's is one; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        if connection.recv(9)[3:4] != b"\x04":  # a frame of settings, which HTTP/2 begins with
            raise ValueError("another server is there")


def predict_files(
    address: str, data: Path, out: Path, *, batch_size: int, checkpoint: Path, stats: Path | None, **options: Any
) -> int:
    """Predicts every row of Parquet files, or every image of a folder, and returns how many there are.

    The rows are written as Parquet files into a folder: `id`, and what `BatchPredictor` returns. They are in no order.
    The folder appears when it is whole.

    Args:
        address: Of the cluster, as `connected` takes it.
        data: A Parquet file, or a folder of Parquet files or of images. Parquet has a column `id`, and inputs in a
            column `x`, or in the only other one. Images are called by their paths within the folder, and a network
            gets them as floats in [0, 1], channels first.
        out: The folder to write.
        batch_size: Inputs at a time.
        checkpoint: As `BatchPredictor` takes it, and so are all the others.
        stats: As there.
        options: As there.

    Raises:
        ValueError: The cluster, the data, the network or the folder are not what they should be; nothing is written.
    """
    options |= {"checkpoint": checkpoint.absolute(), "stats": stats and stats.absolute()}
    # Here too: what is wrong with its files is better said before any worker starts. This machine may have no GPU.
    BatchPredictor(**options | {"device": "cpu"})
    found = _find(data)
    with _appearing(out) as folder, connected(address):
        _run(found, folder, batch_size, options)
        count = sum(_inspect(path)[1] for path in folder.iterdir())
        if count != found.count:
            raise ValueError(f"Expected a prediction for each of {found.count} inputs, got {count}. Run it again.")
    return count


def make_networks(make: "Maker", left: "list[Run]", console: Console) -> dict[str, str]:
    """Makes an experiment's networks as tasks of a cluster, each on a core; returns why some failed, by name.

    Results and the cache folder have to be on storage that all machines share: a network whose machine dies is taken up
    by another one where its last checkpoint is. Needs a connection.
    """
    import ray
    from ray.exceptions import RayError

    from stochbn.experiments.data.sources import cache_dir
    from stochbn.experiments.evaluation.plan import summarise

    make = replace(make, folder=make.folder.absolute(), data=make.data and make.data.absolute())
    work = ray.remote(num_cpus=1, max_retries=RETRIES)(_make_network)
    pending = {work.remote(make, run, str(cache_dir().absolute())): run for run in left}
    failures: dict[str, str] = {}
    while pending:
        for done in ray.wait(list(pending))[0]:
            run = pending.pop(done)
            try:
                ray.get(done)
            except RayError as error:
                failures[run.name] = brief(find_cause(error))
            text = failures.get(run.name) or summarise(make.plan(), count_cores())
            console.print(f"{run.name}: {text}", highlight=False, markup=False, soft_wrap=True)
    return failures


def count_cores() -> int:
    """Returns how many cores the cluster has at the moment."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def find_cause(error: BaseException) -> BaseException:
    """Returns the error that a worker raised, out of those that Ray has put around it."""
    # Not by __cause__: there Ray Data puts an empty SystemException of its own behind errors that are not a worker's.
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    return error


def call_on_images(model: nn.Module, images: Tensor) -> Tensor:
    """Calls a network on images as files have them: bytes (N, H, W) or (N, H, W, C)."""
    images = images.unsqueeze(3) if images.dim() == 3 else images
    output: Tensor = model(images.permute(0, 3, 1, 2).float() / 255)
    return output


def _make_network(make: "Maker", run: "Run", cache: str) -> None:
    from stochbn.experiments.training.checkpoints import LockedError

    os.environ["STOCHBN_DATA"] = cache
    torch.set_num_threads(1)
    while True:
        try:
            return make(run, Console(width=400))
        except LockedError:  # by another queue, or by a worker that is not quite dead
            time.sleep(LOOKS)


@dataclass(frozen=True)
class _Found:
    """Files to predict."""

    files: list[str]
    count: int  # of their rows, or of the images
    column: str | None  # of inputs in Parquet files; None for images
    folder: str  # that the images are in


def _find(data: Path) -> _Found:
    if not data.exists():
        raise ValueError(f"Expected data at {data}, got nothing there.")
    inside = sorted(path for path in data.rglob("*") if path.is_file()) if data.is_dir() else [data]
    if files := [path for path in inside if path.suffix == ".parquet"]:
        column, count = _inspect_all(files)
    elif files := [path for path in inside if path.suffix.lower() in IMAGES]:
        column, count = None, len(files)
    else:
        raise ValueError(f"Expected a .parquet file, or a folder of these or of images, got neither in {data}.")
    return _Found([str(path.absolute()) for path in files], count, column, str(data.absolute()))


def _run(found: _Found, folder: Path, batch_size: int, options: dict[str, Any]) -> None:
    """Streams from files through actors that predict to files in a folder; Ray holds up what is too far ahead."""
    from ray import data
    from ray.exceptions import RayError

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised, and reported once
    context = data.DataContext.get_current()
    context.enable_progress_bars = sys.stderr.isatty()
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    # The second version starts processes of their own to read footers: over 1 s for one small file, not 0.2 s.
    context.use_datasource_v2 = False
    if found.column is not None:
        rows = data.read_parquet(found.files, columns=["id", found.column], num_cpus=READING)
        options = {**options, "column": found.column}
    else:
        model = load_model(options["factory"], options["checkpoint"], "cpu")
        channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
        images = data.read_images(found.files, mode=MODES.get(channels, "RGB"), include_paths=True, num_cpus=READING)
        rows = images.map_batches(_name_images, fn_kwargs={"folder": found.folder}, batch_size=None, num_cpus=READING)
        options = {**options, "call": call_on_images}
    try:
        rows.map_batches(
            BatchPredictor,
            fn_constructor_kwargs=options,
            batch_size=batch_size,
            batch_format="numpy",
            compute=data.ActorPoolStrategy(),
            num_cpus=PREDICTING,
            num_gpus=1 if str(options.get("device")).startswith("cuda") else None,
        ).write_parquet(str(folder), ray_remote_args={"num_cpus": READING})
    except RayError as error:
        raise ValueError(brief(find_cause(error))) from error


def _name_images(batch: dict[str, np.ndarray], folder: str) -> dict[str, np.ndarray]:
    return {"id": np.array([os.path.relpath(path, folder) for path in batch["path"]]), "x": batch["image"]}


def _inspect_all(files: list[Path]) -> tuple[str, int]:
    """Returns the name of the column of inputs in Parquet files, and how many rows they have."""
    column, count = "", 0
    for path in files:
        names, rows = _inspect(path)
        others = [name for name in names if name != "id"]
        column = column or ("x" if "x" in others or len(others) != 1 else others[0])
        count += rows
        if missing := {"id", column} - {*names}:
            raise ValueError(
                f"Expected columns 'id' and {column!r} in {path}, got {listing(names, most=5)}. Name the inputs 'x', "
                f"and number them: {listing(sorted(missing))} is missing."
            )
    return column, count


def _inspect(path: Path) -> tuple[list[str], int]:
    """Returns columns and number of rows of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
        return metadata.schema.to_arrow_schema().names, metadata.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"Expected a Parquet file, got {path}, which cannot be read ({brief(error)}).") from error


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Makes a folder under another name, which becomes `out` at the end, or is removed after an error."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"Expected --out to be a new folder, got {out}, which is there. Name another, or remove it.")
    folder = out.absolute().with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"Expected to write to {out}, got {brief(error)}. Name another --out.") from error
    try:
        yield folder
        os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
