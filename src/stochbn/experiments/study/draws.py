"""Trained networks → draws of every method, kept in the cache: how far one network and its statistics get.

Whatever is chosen (a spread, a temperature) is chosen on validation data. Draws on test data are made with what has
been chosen, and only scored (`measure`).
"""

import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import stochbn
from stochbn.distributions.seeds import member_seed
from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from stochbn.experiments.data.sources import cache_dir
from stochbn.experiments.data.splits import Split
from stochbn.experiments.evaluation.diagnostics import choose_rows
from stochbn.experiments.evaluation.evaluate import finished_runs, load_splits
from stochbn.experiments.evaluation.inference import TrainedNetwork, infer_exactly, predict
from stochbn.experiments.evaluation.jobs import Job, complete
from stochbn.experiments.files import DRAW_SEED, PARTS, PREDICTED, File
from stochbn.experiments.methods import METHODS, Method
from stochbn.experiments.report.differences import NUM_RESAMPLES
from stochbn.experiments.training.checkpoints import checkpoint_path, digest, load_network, read_checkpoint
from stochbn.experiments.training.recipes import Experiment, Recipe

FORMAT = 5  # of the draws in the cache and what they mean
# Drawn for all networks, also on corrupted images; ensembles of these are scored too.
MAIN = ("plain", "sbn", "tuned", "real-tuned", "last", "last-tuned", "last-both", "dropout", "dropout+sbn")
# Side issues, drawn for the first networks: what real mini-batches have that r(μ)r(σ) has not, and what both are for.
SIDE = ("empirical", "channels-apart", "exact")
# Whose best spread is found on the test data themselves, and the spreads that are tried beside the fitted one.
LIMITS: dict[str, tuple[float, ...]] = {"last": (2**-0.5, 2**0.5, 2.0)}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    num_samples: int = 50  # S
    num_compared: int = 3  # networks on which side issues are measured
    num_other: int = 5000  # out-of-domain images
    num_corrupted: int = 200  # test images at each strength of each corruption
    num_exact: int = 200  # inputs of each part for exact inference
    num_resamples: int = NUM_RESAMPLES  # of the intervals of differences


@dataclass(frozen=True)
class Task:
    """A method to draw for one network, and the file of its draws."""

    method: Method
    recipe: Recipe
    seed: int

    @property
    def network(self) -> tuple[Recipe, int]:
        """Whose draws they are."""
        return self.recipe, self.seed

    @property
    def path(self) -> Path:
        """Where the draws are kept."""
        return cache_dir() / "study" / self.recipe.name / f"seed{self.seed}" / f"{self.method.key}.safetensors"


@dataclass(eq=False)
class Study:
    """The networks and the data of an experiment, as far as its draws need them."""

    experiment: Experiment  # which networks; `CheckpointError` if none of them has been trained
    sizes: Sizes  # how much is measured
    data: Path | None = None  # where you keep the published data files
    compiles: bool = False  # whether predictions are compiled
    console: Console = field(default_factory=Console)  # where progress goes

    def __post_init__(self) -> None:
        self.tasks = list_tasks(finished_runs(self.experiment, self.console), self.sizes.num_compared)
        self.splits = load_splits(self.experiment.recipe, self.data)
        other, test = self.splits["out-of-domain"], self.splits["test"]
        self.splits["out-of-domain"] = other[choose_rows(other, self.sizes.num_other)]
        chosen = test[choose_rows(test, self.sizes.num_corrupted)]
        self.corrupted = {
            f"{kind} {strength}": replace(chosen, images=corrupt(chosen.images, kind, strength))
            for kind in CORRUPTIONS
            for strength in STRENGTHS
        }
        self.trained = cache(self._load)

    @property
    def command(self) -> str:
        """What a user types to get this study."""
        return f"stochbn study {self.experiment.name} --samples {self.sizes.num_samples}"

    def draw(self) -> None:
        """Makes the draws of every task that has none yet."""
        complete(map(self._to_job, self.tasks), command=self.command, console=self.console)

    def read(self) -> dict[Task, File]:
        """Reads what has been drawn."""
        return {task: File.read(task.path) for task in self.tasks}

    def source(self, task: Task) -> stochbn.Distribution | None:
        """Returns the distribution that a task draws from, tuned where it is to be; None without SBN."""
        drawing = task.method.drawing
        stats = self.trained(*task.network).distribution(replace(drawing, apart=False))
        if drawing.apart:
            assert isinstance(stats, stochbn.Empirical)
            return take_apart(stats)
        return stats

    def sample(self, task: Task, stats: stochbn.Distribution | None, split: Split) -> Tensor:
        """Returns the log-probabilities of each draw, (S, N, K) in float16."""
        drawing, num_samples = task.method.drawing, self.sizes.num_samples
        if drawing.exhaustive:
            assert isinstance(stats, stochbn.Empirical)
            num_samples = len(stats.observations)
        options: dict[str, Any] = {"num_samples": num_samples, "dropout": drawing.dropout, "compile": self.compiles}
        options |= {"seed": member_seed(DRAW_SEED, task.seed), "progress": self.console.is_terminal}
        network = self.trained(*task.network).network
        temperature = stats.tuning.temperature if stats is not None and stats.tuning is not None else 1.0
        found = predict(network, stats, split, link="identity", keep_samples=True, **options)
        return _to_log_probs(found, temperature)

    def _to_job(self, task: Task) -> Job:
        identity = {
            "study_format": FORMAT,
            "drawing": asdict(task.method.drawing),
            "num_samples": self.sizes.num_samples,
            "weights_sha256": digest(read_checkpoint(checkpoint_path(*task.network)).weights),
        }
        title = f"{task.recipe.name} seed {task.seed}: {task.method.label}"
        return Job(title, task.path, identity, lambda: self._draw(task))

    def _draw(self, task: Task) -> File:
        if task.method.drawing.family == "exact":
            return self._draw_exactly(task)
        stats = self.source(task)
        header = (
            {} if stats is None else {"tuning": stats.tuning and stats.tuning.to_dict(), "bytes": _num_bytes(stats)}
        )
        parts = PARTS if task.method.drawing.spread is not None else PREDICTED
        tensors: dict[str, Tensor] = {part: self.sample(task, stats, self.splits[part]) for part in parts}
        if task.method.key in MAIN:
            # Together, as a call for each of so many small parts would cost more than the predictions.
            splits = self.corrupted.values()
            images, labels = (torch.cat([getattr(split, name) for split in splits]) for name in ("images", "labels"))
            whole = self.sample(task, stats, replace(self.splits["test"], images=images, labels=labels))
            tensors |= dict(zip(self.corrupted, whole.split([*map(len, splits)], dim=1), strict=True))
        return File(header, tensors)

    def _draw_exactly(self, task: Task) -> File:
        """Draws twice S mini-batches on some inputs, to compare each half with the other and what is to come close."""
        options: dict[str, Any] = {"num_samples": 2 * self.sizes.num_samples, "progress": self.console.is_terminal}
        network = self.trained(*task.network).network
        tensors: dict[str, Tensor] = {}
        for part in PARTS:
            index = choose_rows(self.splits[part], self.sizes.num_exact)
            inputs = self.splits[part][index]
            found = infer_exactly(network, task.recipe, self.splits["train"], inputs, link="identity", **options)
            tensors |= {part: _to_log_probs(found), f"{part}/index": index}
        return File({}, tensors)

    def _load(self, recipe: Recipe, seed: int) -> TrainedNetwork:
        network = load_network(checkpoint_path(recipe, seed))
        return TrainedNetwork(network, recipe, seed, self.splits, progress=self.console.is_terminal)


def list_tasks(runs: list[tuple[Recipe, int]], num_compared: int) -> list[Task]:
    """Lists what is to be drawn for these trained networks, side issues for the first of them."""
    limits = [METHODS[key].at(spread) for key, spreads in LIMITS.items() for spread in spreads]
    tasks = []
    for method in (*(METHODS[key] for key in (*MAIN, *SIDE)), *limits):
        own = [run for run in runs if (run[0].dropout > 0) == method.drawing.dropout]
        tasks += [Task(method, *run) for run in (own if method.key in MAIN else own[:num_compared])]
    return tasks


def take_apart(stats: stochbn.Empirical) -> stochbn.Empirical:
    """Destroys the correlations between channels and keeps the rest: shuffles each channel's mini-batches by itself."""
    size, kinds, channels = stats.observations.shape
    generator = torch.Generator().manual_seed(DRAW_SEED)
    index = torch.rand(size, channels, generator=generator).argsort(dim=0)[:, None].expand(-1, kinds, -1)  # (B, 2, C)
    return replace(stats, observations=stats.observations.gather(0, index))


def _to_log_probs(prediction: stochbn.Prediction, temperature: float = 1.0) -> Tensor:
    assert prediction.samples is not None
    return (prediction.samples / temperature).log_softmax(2).half()


def _num_bytes(stats: stochbn.Distribution) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stats")
        stats.save(path)
        return path.stat().st_size
