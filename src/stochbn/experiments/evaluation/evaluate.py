"""Trained networks → prediction files: each network by all its methods, in one small file; then diagnostics of one.

The test data is only ever reported: nothing here chooses anything by it.
"""

import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stochbn.experiments.data.splits import Part, Split, load_split
from stochbn.experiments.evaluation.diagnostics import measure, pick_gallery
from stochbn.experiments.evaluation.inference import TrainedNetwork
from stochbn.experiments.evaluation.jobs import Job, complete
from stochbn.experiments.evaluation.protocols import Protocol, choose_protocol
from stochbn.experiments.files import (
    FORMAT,
    PREDICTED,
    File,
    diagnostics_path,
    is_current,
    pack,
    prediction_path,
    provenance,
)
from stochbn.experiments.training import checkpoints
from stochbn.experiments.training.checkpoints import Checkpoint, CheckpointError, checkpoint_path, load_network
from stochbn.experiments.training.recipes import Experiment, Recipe


def evaluate(
    experiment: Experiment,
    folder: Path,
    *,
    num_samples: int | None = None,
    data: Path | None = None,
    console: Console | None = None,
) -> None:
    """Writes the predictions of every trained network of an experiment into a folder; what is current stays.

    The first plain network is measured more closely, in a file of its own (`diagnostics`).

    Args:
        experiment: Which networks.
        folder: Where the files go, under `predictions/`.
        num_samples: S, draws a network; by default that of the data set's protocol.
        data: Where you keep the published data files, asked before any download.
        console: Where progress goes.

    Raises:
        CheckpointError: No network of the experiment has been trained.
    """
    console = console or Console()
    runs = finished_runs(experiment, console)
    splits = load_splits(experiment.recipe, data)
    for recipe, seed in runs:
        evaluate_network(experiment, recipe, seed, folder, num_samples=num_samples, splits=splits, console=console)
    diagnose(experiment, folder, num_samples=num_samples, splits=splits, console=console)


def evaluate_network(
    experiment: Experiment,
    recipe: Recipe,
    seed: int,
    folder: Path,
    *,
    num_samples: int | None = None,
    data: Path | None = None,
    splits: Mapping[str, Split] | None = None,
    console: Console | None = None,
) -> Path:
    """Writes the predictions of one trained network, by all its methods, and returns their file.

    Each method is written as soon as it is computed. What an interrupted call has computed is kept by the next.
    Arguments are those of `evaluate`; `splits` are the parts of the data, if they are already loaded.

    Raises:
        CheckpointError: The network is not trained to the end, or by another recipe.
    """
    console = console or Console()
    checkpoint = checkpoints.find_checkpoint(recipe, seed)
    network = load_network(checkpoint_path(recipe, seed))
    assert checkpoint is not None  # or there would be no network
    protocol, path = choose_protocol(recipe).vary(num_samples), prediction_path(folder, recipe.name, seed)
    identity, command = _identify(checkpoint, recipe, seed, protocol), _command(experiment, num_samples)

    def make() -> File:
        parts = splits or load_splits(recipe, data)
        common = _describe(experiment, checkpoint, parts) | identity | provenance(command)
        trained = TrainedNetwork(network, recipe, seed, parts, protocol.num_fit_batches, console.is_terminal)
        return _predict(trained, protocol, path, common, console)

    title = f"{recipe.name} seed {seed}: predicted test, out-of-domain and validation data"
    complete([Job(title, path, identity, make)], command=command, console=console)
    return path


def diagnose(
    experiment: Experiment, folder: Path, *, num_samples: int | None, splits: Mapping[str, Split], console: Console
) -> None:
    """Measures the first plain network, if it is trained, and picks the gallery from the predictions of all."""
    recipe, path = experiment.recipe, diagnostics_path(folder)
    if checkpoints.is_trained(recipe, 0):
        protocol, network = choose_protocol(recipe).vary(num_samples), load_network(checkpoint_path(recipe, 0))
        identity = {
            "kind": "diagnostics",
            "format": FORMAT,
            "weights_sha256": checkpoints.digest(network.state_dict()),
            "num_samples": protocol.num_samples,
            "curve": asdict(protocol.curve),
            "has_appendices": protocol.has_appendices,
        }
        make = partial(measure, network, recipe, splits, protocol, console=console)
        job = Job(f"{recipe.name} seed 0: diagnostics", path, identity, make)
        complete([job], command=_command(experiment, num_samples), console=console)
    elif not path.exists():
        console.print(f"{recipe.name} seed 0 is not trained: no diagnostics", highlight=False)
        return
    paths = [prediction_path(folder, recipe.name, seed) for seed in range(experiment.num_seeds)]
    gallery = pick_gallery([File.read(member) for member in paths if member.exists()], splits)
    file = File.read(path)
    File(file.header | gallery.header, file.tensors | gallery.tensors).write(path)


def load_splits(recipe: Recipe, data: Path | None = None) -> dict[str, Split]:
    """Loads every part of the data that a recipe's networks are evaluated on."""
    parts: tuple[Part, ...] = ("train", *PREDICTED)
    return {part: load_split(recipe.data, part, folder=data, class_seed=recipe.class_seed) for part in parts}


def finished_runs(experiment: Experiment, console: Console) -> list[tuple[Recipe, int]]:
    """Lists recipe and seed of the networks that are trained to the end, and says which are not.

    Raises:
        CheckpointError: No network of the experiment has been trained.
    """
    runs = []
    for recipe, seed in experiment.runs():
        if checkpoints.is_trained(recipe, seed):
            runs.append((recipe, seed))
        else:
            console.print(f"{recipe.name} seed {seed}: not trained to the end, left out", highlight=False)
    if not runs:
        raise CheckpointError(
            f"Expected trained networks of {experiment.name}, got none. "
            f"Train them with `stochbn train {experiment.name}{experiment.options} --seeds {experiment.num_seeds}`, "
            f"or do all with `stochbn reproduce {experiment.name}{experiment.options}`."
        )
    return runs


def is_evaluated(recipe: Recipe, seed: int, folder: Path, *, num_samples: int | None = None) -> bool:
    """Returns whether a folder has the predictions of a network, by all its methods.

    A checkpoint may have been lost since, or never have been on this machine: predictions by the same recipe will do.
    """
    checkpoint = checkpoints.find_checkpoint(recipe, seed)
    identity = _identify(checkpoint, recipe, seed, choose_protocol(recipe).vary(num_samples))
    return is_current(prediction_path(folder, recipe.name, seed), identity)


def _identify(checkpoint: Checkpoint | None, recipe: Recipe, seed: int, protocol: Protocol) -> dict[str, Any]:
    weights = {"weights_sha256": checkpoints.digest(checkpoint.weights)} if checkpoint else {}
    return weights | {
        "format": FORMAT,
        "settings": asdict(recipe),
        "seed": seed,
        "num_samples": protocol.num_samples,
        "num_fit_batches": protocol.num_fit_batches,  # which mini-batches the empirical draws are of
        "draws": protocol.draws(recipe),
    }


def _predict(trained: TrainedNetwork, protocol: Protocol, path: Path, common: dict[str, Any], console: Console) -> File:
    """Predicts by every method, on top of what the file already holds of the same network."""
    recipe, splits = trained.recipe, trained.splits
    tensors, records = _resume(path, common)
    for name, part in (("labels", "test"), ("labels/validation", "validation")):
        tensors[name] = splits[part].labels.to(torch.uint8)
    left = [method for method in protocol.methods(recipe) if method.key not in records]
    for alike, group in itertools.groupby(left, lambda method: replace(method.drawing, spread=None)):
        methods, start = list(group), time.perf_counter()
        most, drawings = common["draws"][methods[0].key], [method.drawing for method in methods]
        compiles = protocol.compiles_ends and alike.layers != "all"
        for part in PREDICTED:
            predictions = trained.predict_together(drawings, splits[part], num_samples=most, compile=compiles)
            for method, prediction in zip(methods, predictions, strict=True):
                tensors |= pack(prediction, method.key, part)
        seconds = time.perf_counter() - start
        record = {"seconds": round(seconds / len(methods), 1), "commit": common["commit"]}
        records |= {
            method.key: {"num_samples": trained.num_draws(method.drawing, most), **record} for method in methods
        }
        done = {key: common["draws"][key] for key in records}
        File(common | {"draws": done, "methods": records}, tensors).write(path)
        names = ", ".join(method.key for method in methods)
        line = f"{recipe.name} seed {trained.seed}: {names}, {seconds:.0f} s"
        console.print(line, highlight=False, soft_wrap=True)
    return File(common | {"methods": records}, tensors)


def _resume(path: Path, common: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns tensors and records of the methods that a file of the same network already has."""
    same = ("format", "weights_sha256", "draw_seed", "num_fit_batches")
    if not is_current(path, {key: common[key] for key in same}):
        return {}, {}
    file = File.read(path)
    kept = {key for key, most in file.header.get("draws", {}).items() if common["draws"].get(key) == most}
    tensors = {name: tensor for name, tensor in file.tensors.items() if name.split("/")[0] in kept}
    return tensors, {key: record for key, record in file.header.get("methods", {}).items() if key in kept}


def _describe(experiment: Experiment, checkpoint: Checkpoint, splits: Mapping[str, Split]) -> dict[str, Any]:
    """Returns what a report says of a training run."""
    recipe, history = checkpoint.recipe, checkpoint.history
    return {
        "kind": "predictions",
        "experiment": experiment.name,
        "out_of_domain": splits["out-of-domain"].name,
        "classes": splits["test"].classes,
        "recipe": recipe.name,
        "data": recipe.data,
        "batch_size": recipe.mini_batch_size,
        "epochs": recipe.epochs,
        "train_seconds": sum(epoch["seconds"] for epoch in history),
        **{key: [epoch[key] for epoch in history] for key in ("train_loss", "validation_nll", "validation_error")},
        **({"options": experiment.options.strip()} if experiment.options else {}),
    }


def _command(experiment: Experiment, num_samples: int | None) -> str:
    samples = "" if num_samples is None else f" --samples {num_samples}"
    return f"stochbn evaluate {experiment.name}{experiment.options}{samples}"
