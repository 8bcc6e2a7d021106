"""Trained networks → draws of every method, kept in the cache: how far one network and its statistics get.

Whatever is chosen (a spread, a temperature) is chosen on validation data. Draws on test data are made with what has
been chosen, and only scored (`study_results`).
"""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

import stochbn
from stochbn.distributions.seeds import member_seed
from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from stochbn.experiments.data.sources import cache_dir
from stochbn.experiments.data.splits import Part, Split, load_split
from stochbn.experiments.evaluation.diagnostics import choose_rows
from stochbn.experiments.evaluation.evaluate import finished_runs
from stochbn.experiments.evaluation.inference import fit, input_batches, training_batches, tune
from stochbn.experiments.files import DRAW_SEED, PARTS, File, is_current, provenance
from stochbn.experiments.training.checkpoints import checkpoint_path, digest, load_network, read_checkpoint
from stochbn.experiments.training.recipes import Experiment, Recipe
from stochbn.statistics.layers import all_batch_norms

FORMAT = 3  # of the draws in the cache and what they mean
NUM_COMPARED = 3  # networks on which side issues are measured
NUM_STRANGE = 5000  # out-of-domain images
NUM_CORRUPTED = 200  # test images at each strength of each corruption
NUM_EXACT = 200  # inputs of each part for exact inference


@dataclass(frozen=True)
class Variant:
    """One way to draw networks around a trained one.

    Attributes:
        name: As in the tables.
        family: Of the statistics; None without SBN.
        conditioned: Whether the input is counted into its mini-batch.
        tuned: Whether the spread is chosen on validation data: one for the network, for each layer, or one for all
            networks of an ensemble.
        dropout: Whether it is for the networks with dropout.
        last: Whether the last BatchNorm layer alone is drawn, and the others keep to their running statistics.
        apart: Of "empirical", which of its correlations are destroyed: those between layers; between channels too; all.
        spread: A spread to measure on test data, to know what the best choice of one would have given.
        exhaustive: Of "empirical", whether each mini-batch that was kept is drawn once, in place of S of them.
        everywhere: Whether it is drawn for all networks and on corrupted images too, or for some on test data.
    """

    name: str
    family: Literal["factorized", "lowrank", "empirical", "exact"] | None = None
    conditioned: bool = False
    tuned: Literal["network", "layers", "ensemble"] | None = None
    dropout: bool = False
    last: bool = False
    apart: Literal["layers", "channels", "numbers"] | None = None
    spread: float | None = None
    exhaustive: bool = False
    everywhere: bool = False

    @property
    def approximates(self) -> bool:
        """Tells whether it is meant to be exact inference with one network, nothing being chosen."""
        return not (self.family == "exact" or self.tuned or self.dropout or self.last or self.spread)


PLAIN = "One network"
EXHAUSTIVE = "Empirical, conditioned, tuned, all draws"
LAST = "Last layer"  # in full: empirical, conditioned, the last layer alone, all draws
# Whose best spread is found on the test data themselves, and the spreads that are tried beside the fitted one.
LIMITS: dict[str, tuple[float, ...]] = {
    "SBN": (2**0.5, 2.0, 2**1.5),
    "Empirical, conditioned": (2**-0.5, 2**0.5, 2.0),
    LAST: (2**-0.5, 2**0.5, 2.0),
}
_LAST: dict[str, Any] = {"family": "empirical", "conditioned": True, "last": True, "exhaustive": True}
VARIANTS = (
    Variant(PLAIN, everywhere=True),
    Variant("SBN", "factorized", everywhere=True),
    Variant("SBN, tuned", "factorized", tuned="network", everywhere=True),
    Variant("SBN, tuned by layer", "factorized", tuned="layers"),
    Variant("SBN, conditioned", "factorized", conditioned=True),
    Variant("SBN, conditioned, tuned", "factorized", conditioned=True, tuned="network"),
    Variant("Low rank", "lowrank"),
    Variant("Low rank, tuned", "lowrank", tuned="network"),
    Variant("Empirical", "empirical"),
    Variant("Empirical, tuned", "empirical", tuned="network"),
    Variant("Empirical, conditioned", "empirical", conditioned=True),
    Variant(EXHAUSTIVE, "empirical", conditioned=True, tuned="network", exhaustive=True, everywhere=True),
    Variant("Empirical, conditioned, tuned", "empirical", conditioned=True, tuned="network", everywhere=True),
    Variant(LAST, **_LAST, everywhere=True),
    Variant(f"{LAST}, tuned", **_LAST, tuned="network", everywhere=True),
    Variant("SBN, last layer, tuned", "factorized", tuned="network", last=True, everywhere=True),
    Variant("Members of SBN, tuned", "factorized", tuned="ensemble", everywhere=True),
    Variant("Members of empirical, tuned", "empirical", conditioned=True, tuned="ensemble", everywhere=True),
    Variant("Dropout", dropout=True, everywhere=True),
    Variant("Dropout + SBN", "factorized", dropout=True, everywhere=True),
    Variant("Dropout + SBN, tuned", "factorized", dropout=True, tuned="network", everywhere=True),
    Variant("Empirical, layers apart", "empirical", apart="layers"),
    Variant("Empirical, channels apart", "empirical", apart="channels"),
    Variant("Empirical, all apart", "empirical", apart="numbers"),
    Variant("Exact (eq. 3)", "exact"),
    *(Variant(f"SBN, spread {k:.2f}", "factorized", spread=k) for k in LIMITS["SBN"]),
    *(
        Variant(f"Empirical, conditioned, spread {k:.2f}", "empirical", conditioned=True, spread=k)
        for k in LIMITS["Empirical, conditioned"]
    ),
    *(Variant(f"{LAST}, spread {k:.2f}", **_LAST, spread=k) for k in LIMITS[LAST]),
)


@dataclass(frozen=True)
class Job:
    """A variant on one network, and the file of its draws."""

    variant: Variant
    recipe: Recipe
    seed: int

    @property
    def path(self) -> Path:
        """Returns where the draws are kept."""
        slug = self.variant.name.lower().replace(",", "").replace(" ", "-")
        return cache_dir() / "study" / self.recipe.name / f"seed{self.seed}" / f"{slug}.safetensors"


def list_jobs(experiment: Experiment, console: Console, only: Collection[str] = ()) -> list[Job]:
    """Lists what is to be drawn for the trained networks of an experiment; the plain networks are always among it."""
    unknown = sorted(set(only) - {variant.name for variant in VARIANTS})
    if unknown:
        names = "; ".join(variant.name for variant in VARIANTS)
        raise ValueError(f"Expected names of the study's variants, got {'; '.join(unknown)}. There are: {names}.")
    runs = finished_runs(experiment, console)
    jobs = []
    for variant in VARIANTS:
        if only and variant.name not in (*only, PLAIN):
            continue
        own = [(recipe, seed) for recipe, seed in runs if (recipe.dropout > 0) == variant.dropout]
        if variant.tuned == "ensemble" and len(own) < 2:
            continue
        jobs += [Job(variant, *run) for run in (own if variant.everywhere else own[:NUM_COMPARED])]
    return jobs


class Study:
    """The networks and the data of an experiment, as far as its jobs need them.

    Args:
        experiment: Which networks.
        num_samples: S.
        data: Where you keep the published data files.
        compiles: Whether predictions are compiled.
        only: Names of the variants to draw; all if there are none.
        console: Where progress goes.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        num_samples: int = 50,
        data: Path | None = None,
        compiles: bool = False,
        only: Collection[str] = (),
        console: Console | None = None,
    ) -> None:
        self.experiment = experiment
        self.num_samples = num_samples
        self.compiles = compiles
        self.console = console or Console()
        self.only = tuple(only)
        self.jobs = list_jobs(experiment, self.console, only)
        recipe = experiment.recipe
        parts: tuple[Part, ...] = ("train", "validation", *PARTS)
        self.splits: dict[str, Split] = {
            part: load_split(recipe.data, part, folder=data, class_seed=recipe.class_seed) for part in parts
        }
        strange = self.splits["out-of-domain"]
        self.splits["out-of-domain"] = strange[choose_rows(strange, NUM_STRANGE)]
        self.corrupted = corrupt_all(self.splits["test"])
        self.network = cache(self._network)
        self.fitted = cache(self._fitted)
        self.tuned = cache(self._tuned)
        self.tuned_ensemble = cache(self._tuned_ensemble)

    def draw(self, jobs: Sequence[Job] | None = None) -> None:
        """Makes the draws of every job that has none yet."""
        for job in self.jobs if jobs is None else jobs:
            identity = self._identity(job)
            if is_current(job.path, identity):
                continue
            header, tensors = self._draw(job)
            job.path.parent.mkdir(parents=True, exist_ok=True)
            File(header | identity | provenance(f"stochbn study {self.experiment.name}"), tensors).write(job.path)
            self.console.print(f"{job.recipe.name} seed {job.seed}: {job.variant.name}", highlight=False)

    def _identity(self, job: Job) -> dict[str, Any]:
        members = self._members(job) if job.variant.tuned == "ensemble" else [job]
        return {
            "study_format": FORMAT,
            "variant": asdict(job.variant),
            "num_samples": self.num_samples,
            "weights_sha256": [
                digest(read_checkpoint(checkpoint_path(member.recipe, member.seed)).weights) for member in members
            ],
        }

    def _draw(self, job: Job) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if job.variant.family == "exact":
            return {}, self._draw_exactly(job)
        stats = self.source(job)
        header: dict[str, Any] = {}
        if stats is not None:
            header = {"tuning": stats.tuning and asdict(stats.tuning), "stats_bytes": _num_bytes(stats)}
        parts: dict[str, Split] = {part: self.splits[part] for part in PARTS}
        if job.variant.spread is None:
            parts["validation"] = self.splits["validation"]
        if job.variant.everywhere:
            parts |= self.corrupted
        network, more = self.network(job.recipe, job.seed), self._more(job)
        if more is not None:  # draw i is the same however many there are
            return header, {part: more.tensors[part][: self._count(stats, job)] for part in parts}
        return header, {part: self._samples(network, stats, split, job) for part, split in parts.items()}

    def _more(self, job: Job) -> File | None:
        """Returns the draws of the same variant with all mini-batches, if they are there."""
        for other in self.jobs:
            alike = replace(other.variant, name=job.variant.name, exhaustive=False) == job.variant
            if other.variant.exhaustive and alike and (other.recipe, other.seed) == (job.recipe, job.seed):
                return File.read(other.path) if is_current(other.path, self._identity(other)) else None
        return None

    def _count(self, stats: stochbn.Distribution | None, job: Job) -> int:
        """Returns how many draws are made: on validation data, where a temperature is chosen, as many as elsewhere."""
        if job.variant.exhaustive:
            assert isinstance(stats, stochbn.Empirical)
            return len(stats.observations)
        return self.num_samples

    def _samples(
        self,
        network: nn.Module,
        stats: stochbn.Distribution | None,
        split: Split,
        job: Job,
        *,
        compiles: bool | None = None,
    ) -> Tensor:
        """Returns the log-probabilities of each draw, (S, N, K) in float16."""
        found = stochbn.predict(
            network,
            stats,
            input_batches(split),
            num_samples=self._count(stats, job),
            seed=member_seed(DRAW_SEED, job.seed),
            link="identity",
            dropout=job.variant.dropout,
            compile=self.compiles if compiles is None else compiles,
            progress=self.console.is_terminal,
        ).samples
        assert found is not None
        return found.log_softmax(2).half()

    def _draw_exactly(self, job: Job) -> dict[str, Tensor]:
        """Draws twice S mini-batches on some inputs, to compare each half with the other and what is to come close."""
        network = self.network(job.recipe, job.seed)
        tensors: dict[str, Tensor] = {}
        for part in PARTS:
            index = choose_rows(self.splits[part], NUM_EXACT)
            found = stochbn.exact_predict(
                network,
                training_batches(self.splits["train"], job.recipe),
                input_batches(self.splits[part][index]),
                batch_size=job.recipe.mini_batch_size,
                num_samples=2 * self.num_samples,
                seed=DRAW_SEED,
                link="identity",
                progress=self.console.is_terminal,
            ).samples
            assert found is not None
            tensors |= {part: found.log_softmax(2).half(), f"{part}/index": index}
            for variant in VARIANTS:
                if variant.approximates:
                    other = replace(job, variant=variant)
                    tensors[f"{part}/{variant.name}"] = self._samples(
                        network, self.source(other), self.splits[part][index], other, compiles=False
                    )
        return tensors

    def source(self, job: Job) -> stochbn.Distribution | None:
        """Returns a job's distribution, tuned where it is to be."""
        variant = job.variant
        if variant.family is None:
            return None
        if variant.tuned == "ensemble":
            return self.tuned_ensemble(variant)[self._members(job).index(job)]
        stats = self._untuned(job)
        if variant.apart:
            assert isinstance(stats, stochbn.Empirical)
            stats = take_apart(stats, variant.apart)
        if variant.spread is not None:
            return replace(stats, tuning=stochbn.Tuning(variant.spread))
        if variant.tuned is None:
            return stats
        return self.tuned(replace(job, variant=replace(variant, name="", exhaustive=False, everywhere=False)))

    def _tuned(self, job: Job) -> stochbn.Distribution:
        stats = self._untuned(job)
        tuned: stochbn.Distribution = tune(
            self.network(job.recipe, job.seed),
            stats,
            self.splits["validation"],
            seed=job.seed,
            num_groups=min(3, len(stats.layers)) if job.variant.tuned == "layers" else 1,
            dropout=job.variant.dropout,
            progress=self.console.is_terminal,
        )
        return tuned

    def _tuned_ensemble(self, variant: Variant) -> list[stochbn.Distribution]:
        members = self._members(Job(variant, self.experiment.recipe, 0))
        networks = [self.network(member.recipe, member.seed) for member in members]
        stats = [self._untuned(member) for member in members]
        return list(tune(networks, stats, self.splits["validation"], progress=self.console.is_terminal))

    def _untuned(self, job: Job) -> stochbn.Distribution:
        fitted = self.fitted(job.recipe, job.seed, job.variant.family, job.variant.last)
        return replace(fitted, conditioned=job.variant.conditioned)

    def _members(self, job: Job) -> list[Job]:
        return [other for other in self.jobs if other.variant == job.variant]

    def _network(self, recipe: Recipe, seed: int) -> nn.Module:
        return load_network(checkpoint_path(recipe, seed))

    def _fitted(self, recipe: Recipe, seed: int, family: str, last: bool) -> stochbn.Distribution:
        network = self.network(recipe, seed)
        layers = list(all_batch_norms(network))[-1:] if last else None
        return fit(network, self.splits["train"], recipe, layers=layers, family=family, dropout=recipe.dropout > 0)


def _num_bytes(stats: stochbn.Distribution) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stats")
        stats.save(path)
        return path.stat().st_size


def corrupt_all(test: Split) -> dict[str, Split]:
    """Returns some test images at each strength of each corruption, by name, such as "noise 3"."""
    chosen = test[choose_rows(test, NUM_CORRUPTED)]
    return {
        f"{kind} {strength}": replace(chosen, images=corrupt(chosen.images, kind, strength))
        for kind in CORRUPTIONS
        for strength in STRENGTHS
    }


def take_apart(stats: stochbn.Empirical, apart: str) -> stochbn.Empirical:
    """Destroys correlations and keeps the rest: shuffles the mini-batches of each layer, channel or number by itself.

    Args:
        stats: With the statistics of real mini-batches.
        apart: "layers" leaves correlations within each layer; "channels" those between the mean and the variance of a
            channel; "numbers" none.
    """
    size, kinds, channels = stats.observations.shape
    generator = torch.Generator().manual_seed(DRAW_SEED)

    def orders(count: int) -> Tensor:
        return torch.rand(size, count, generator=generator).argsort(dim=0)  # (B, count)

    if apart == "numbers":
        index = orders(kinds * channels).view(size, kinds, channels)
    elif apart == "channels":
        index = orders(channels)[:, None].expand(-1, kinds, -1)
    else:
        each = orders(len(stats.sizes)).repeat_interleave(torch.tensor(stats.sizes), dim=1)
        index = each[:, None].expand(-1, kinds, -1)
    return replace(stats, observations=stats.observations.gather(0, index))
