"""Trained networks → prediction files: for each network its methods on test and out-of-domain data, then diagnostics.

The test data is only ever reported: nothing here chooses anything by it.
"""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import stochbn
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.data.splits import Part, Split, load_split
from stochbn.experiments.evaluation.diagnostics import measure, pick_gallery
from stochbn.experiments.evaluation.inference import DRAW_SEED, predict_network
from stochbn.experiments.files import FORMAT, PARTS, File, diagnostics_path, prediction_path
from stochbn.experiments.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    digest,
    load_network,
    read_checkpoint,
)
from stochbn.experiments.training.recipes import Experiment, Recipe


def evaluate(
    experiment: Experiment,
    folder: Path,
    *,
    num_samples: int = 50,
    data: Path | None = None,
    console: Console | None = None,
) -> None:
    """Writes the predictions of every trained network of an experiment into a folder; what is current stays.

    The first plain network is measured more closely, in a file of its own (`diagnostics`).

    Args:
        experiment: Which networks.
        folder: Where the files go, under `predictions/`.
        num_samples: S, draws a network.
        data: Where you keep the published data files, asked before any download.
        console: Where progress goes.

    Raises:
        CheckpointError: No network of the experiment has been trained.
    """
    console = console or Console()
    runs = finished_runs(experiment, console)
    recipe = experiment.recipe
    parts: tuple[Part, ...] = ("train", "validation", *PARTS)
    splits: dict[str, Split] = {
        part: load_split(recipe.data, part, folder=data, class_seed=recipe.class_seed) for part in parts
    }
    made_by = provenance(f"stochbn evaluate {experiment.name}{experiment.options} --samples {num_samples}")
    for recipe, seed in runs:
        path, checkpoint = prediction_path(folder, recipe.name, seed), read_checkpoint(checkpoint_path(recipe, seed))
        identity = {"format": FORMAT, "weights_sha256": digest(checkpoint.weights), "num_samples": num_samples}
        if not is_current(path, identity):
            network = load_network(checkpoint_path(recipe, seed))
            tensors = predict_network(
                network, recipe, seed, splits, num_samples=num_samples, progress=console.is_terminal
            )
            header = {
                "kind": "predictions",
                "experiment": experiment.name,
                "out_of_domain": splits["out-of-domain"].name,
                "classes": splits["test"].classes,
            }
            if experiment.options:
                header["options"] = experiment.options.strip()
            File(header | identity | _describe_run(checkpoint) | made_by, tensors).write(path)
        console.print(f"{recipe.name} seed {seed}: predicted test and out-of-domain data", highlight=False)
    if runs[0] != (experiment.recipe, 0):
        console.print(f"{experiment.recipe.name} seed 0 is not trained: no diagnostics", highlight=False)
        return
    network = load_network(checkpoint_path(*runs[0]))
    path = diagnostics_path(folder)
    identity = {"format": FORMAT, "weights_sha256": digest(network.state_dict()), "num_samples": num_samples}
    if is_current(path, identity):
        file = File.read(path)
    else:
        file = measure(network, experiment.recipe, splits, num_samples=num_samples, console=console)
        file = File(file.header | {"kind": "diagnostics"} | identity | made_by, file.tensors)
    members = [prediction_path(folder, recipe.name, seed) for recipe, seed in runs if not recipe.dropout]
    gallery = pick_gallery([File.read(member) for member in members], splits)
    File(file.header | gallery.header, file.tensors | gallery.tensors).write(path)
    console.print(f"{experiment.recipe.name} seed 0: diagnostics", highlight=False)


def finished_runs(experiment: Experiment, console: Console) -> list[tuple[Recipe, int]]:
    """Lists recipe and seed of the networks that are trained to the end, and says which are not.

    Raises:
        CheckpointError: No network of the experiment has been trained.
    """
    runs = []
    for recipe, seed in experiment.runs():
        if _is_finished(recipe, seed):
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


def _describe_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what a report tells of a training run."""
    recipe = checkpoint.recipe
    return {
        "recipe": recipe.name,
        "seed": checkpoint.seed,
        "data": recipe.data,
        "batch_size": recipe.mini_batch_size,
        "epochs": recipe.epochs,
        "validation_nll": [epoch["validation_nll"] for epoch in checkpoint.history],
        "train_seconds": sum(epoch["seconds"] for epoch in checkpoint.history),
    }


def provenance(command: str) -> dict[str, Any]:
    """Returns by what a number was made: the command, the commit, versions, the seed of the draws."""
    return {
        "command": command,
        "commit": commit(Path(__file__)),
        "versions": {
            "stochbn": stochbn.__version__,
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
        "draw_seed": DRAW_SEED,
    }


def commit(file: Path) -> str:
    """Returns a file's commit, marked if the code has changed since; "unknown" if it has none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # not some repository around an installed package
        return git("rev-parse", "--short=12", "HEAD") + (
            "-changed" if git("status", "--porcelain", ":/src", ":/benchmarks") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _is_finished(recipe: Recipe, seed: int) -> bool:
    path = checkpoint_path(recipe, seed)
    if not path.exists():
        return False
    checkpoint = read_checkpoint(path)
    if (checkpoint.recipe, checkpoint.seed) != (recipe, seed):
        raise CheckpointError(
            f"Expected a checkpoint of {recipe.name} as it is now, got one of another recipe or seed: {path}. "
            "Delete it and train anew."
        )
    return checkpoint.finished


def is_current(path: Path, identity: dict[str, Any]) -> bool:
    """Tells whether a file is there and was made of the same."""
    try:
        header = File.read(path).header
    except DataError:
        return False
    return all(header.get(key) == value for key, value in identity.items())
