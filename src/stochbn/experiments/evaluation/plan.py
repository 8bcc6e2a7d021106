"""Which networks of an experiment are done, running and left, and how long that will take."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from stochbn.experiments.evaluation.evaluate import is_evaluated
from stochbn.experiments.files import File, prediction_path
from stochbn.experiments.training.checkpoints import checkpoint_path, find_checkpoint, is_locked
from stochbn.experiments.training.recipes import Experiment, Recipe


@dataclass(frozen=True)
class Run:
    """One network of an experiment and how far it is."""

    recipe: Recipe  # it is trained by
    seed: int  # it is trained with
    # "done" if its predictions are there, also without the network; "running" if a process is at work on it
    state: Literal["done", "running", "left"]
    epochs: int  # how many it is trained for
    seconds_left: float | None  # what is left to do on one core, if that can be estimated

    @property
    def name(self) -> str:
        """Returns what logs call it."""
        return f"{self.recipe.name} seed {self.seed}"


def plan(experiment: Experiment, folder: Path, *, num_samples: int | None = None) -> list[Run]:
    """Lists the networks of an experiment in the order in which they are made. Computes nothing.

    An epoch is expected to take as long as those of the same recipe, or else of the other one, took so far; images of
    half the side take a quarter of it. An evaluation is expected to take as long as another of the recipe did.

    Raises:
        CheckpointError: A checkpoint is damaged or of another recipe.
    """
    epochs, done = {}, set()
    trained: dict[Recipe, list[tuple[float, float]]] = {}  # seconds and work of each epoch
    evaluated: dict[Recipe, list[float]] = {}
    for recipe, seed in experiment.runs():
        checkpoint = find_checkpoint(recipe, seed)
        history = checkpoint.history if checkpoint else []
        epochs[recipe, seed] = len(history)
        trained.setdefault(recipe, []).extend((one["seconds"], _work_of(recipe, i)) for i, one in enumerate(history))
        if (checkpoint is None or checkpoint.finished) and is_evaluated(recipe, seed, folder, num_samples=num_samples):
            done.add((recipe, seed))
            records = File.read(prediction_path(folder, recipe.name, seed)).header.get("methods", {}).values()
            evaluated.setdefault(recipe, []).append(sum(record["seconds"] for record in records))
    every = [epoch for of_recipe in trained.values() for epoch in of_recipe]
    runs = []
    for (recipe, seed), count in epochs.items():
        if (recipe, seed) in done:
            runs.append(Run(recipe, seed, "done", count, 0.0))
            continue
        left = None
        if every:
            seconds, work = map(sum, zip(*(trained[recipe] or every), strict=True))
            left = seconds / work * sum(_work_of(recipe, epoch) for epoch in range(count, recipe.epochs))
            left += max(evaluated.get(recipe, [0.0]))
        is_running = is_locked(checkpoint_path(recipe, seed))
        runs.append(Run(recipe, seed, "running" if is_running else "left", count, left))
    return runs


def show(runs: Sequence[Run], jobs: int, console: Console) -> None:
    """Prints a plan: a row for each network, and how long all of it will take."""
    table = Table("network", "seed", "epochs", "state", "left")
    for run in runs:
        left = "" if run.state == "done" else _clock(run.seconds_left)
        table.add_row(run.recipe.name, str(run.seed), f"{run.epochs} of {run.recipe.epochs}", run.state, left)
    console.print(table)
    console.print(summarise(runs, jobs), highlight=False, soft_wrap=True)


def summarise(runs: Sequence[Run], jobs: int) -> str:
    """Returns a plan in a line.

    Examples:
        >>> from stochbn.experiments.training.recipes import RECIPES
        >>> summarise([Run(RECIPES["lenet5"], 0, "left", 25, 7200.0), Run(RECIPES["lenet5"], 1, "done", 50, 0.0)], 2)
        '1 of 2 networks done, 0 running, 1 left; about 2 h 00 min to go.'
    """
    counts = {state: sum(run.state == state for run in runs) for state in ("done", "running", "left")}
    line = f"{counts['done']} of {len(runs)} networks done, {counts['running']} running, {counts['left']} left"
    known = [run.seconds_left for run in runs if run.seconds_left is not None]
    if counts["done"] == len(runs):
        return f"{line}."
    left = max(sum(known) / jobs, *known, 0.0) if len(known) == len(runs) else None
    return f"{line}; about {_clock(left)} to go." if left is not None else f"{line}; how long is known after an epoch."


def _work_of(recipe: Recipe, epoch: int) -> float:
    """Returns how much there is to compute in an epoch, in units that are the same for all epochs of a recipe."""
    return float((recipe.image_size(epoch) or 1) ** 2)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
