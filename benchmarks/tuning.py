"""`python -m benchmarks.tuning`: does `tune` hold on little held-out data, easy and hard?

Eight small networks learn eight of ten digits, from all images, which leaves hardly a mistake, and from a hundred.
Validation images tune them, by the rule of `tune` and by the lowest point of the curve. As many others score the
result, and the two digits that were left out show what the draws still say. The six LeNet-5s of the reproduction join
them where they are trained: half of their validation images tune, the other half scores, and 500 negatives are unknown.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stochbn
from benchmarks.machine import describe
from stochbn.experiments.data.embedded import load_digits
from stochbn.experiments.data.splits import load_split, to_inputs
from stochbn.experiments.evaluation.inference import training_batches
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.training.checkpoints import checkpoint_path, is_trained, load_network
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES
from stochbn.inference.choosing import compare
from stochbn.inference.tune import NARROWER, SPREADS, WIDER

RECIPE = RECIPES["digits"]
NUM_NETWORKS = 8
# Images to tune on, and as many to score; and to learn from, None for the rest.
LEVELS: dict[str, tuple[int, int | None]] = {"easy": (200, None), "hard": (500, 100)}
LENET5 = EXPERIMENTS["lenet5"]
Labelled = tuple[Tensor, Tensor]
FAMILIES: dict[str, dict[str, Any]] = {
    "all layers, factorized": {},
    "last layer, empirical": {"layers": "last", "family": "empirical", "conditioned": True},
}
# What a verdict says, and the words for it.
SAID = {
    "plain": "draws may still help",
    "narrower": "narrower",
    "few": "too few",
    "mistakes": "cannot choose",
    "chance": "may be chance",
}
OPEN = {"plain", "few", "mistakes", "chance"}  # that the plain network won, or that the data cannot say
COLLAPSED = 0.1  # of the fitted spread's disagreement about unknown digits


def main() -> None:
    """Measures, prints, and writes `results/tuning.json`."""
    console = Console(width=150)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is warned of is in the verdicts too
        rows = list(measure_all(console))
    columns = (
        "level",
        "seed",
        "family",
        "rule",
        "spread",
        "temperature",
        "nll",
        "epistemic",
        "auroc",
        "collapsed",
        "says",
        "worse",
    )
    table = Table(*columns, title="Tuned on some digits, scored on others")
    for row in rows:
        table.add_row(*(f"{row[key]:.4f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    console.print(table)
    levels = dict.fromkeys(row["level"] for row in rows)
    summary = {level: summarise([row for row in rows if row["level"] == level]) for level in levels}
    console.print(summary)
    results = describe("python -m benchmarks.tuning") | {"levels": LEVELS, "summary": summary, "rows": rows}
    Path("results/tuning.json").write_text(json.dumps(rounded(results), indent=1) + "\n")


def measure_all(console: Console) -> Iterator[dict[str, Any]]:
    """Yields the rows of every network, with its level and seed."""
    for level, seed in product(LEVELS, range(NUM_NETWORKS)):
        yield from ({"level": level, "seed": seed, **row} for row in measure(learn_digits(level, seed)))
    for seed in range(LENET5.num_seeds):
        if not is_trained(LENET5.recipe, seed):
            console.print(f"LeNet-5 seed {seed} is left out: stochbn reproduce lenet5 trains it")
            continue
        yield from ({"level": "lenet5", "seed": seed, **row} for row in measure(load_lenet5(seed)))


@dataclass(frozen=True)
class Subject:
    """A trained network, and data: batches to fit to, labelled inputs to tune on and to score, and unknown ones."""

    model: nn.Module
    training: Sequence[Tensor]
    batch_size: int
    held_out: Labelled
    others: Labelled
    unknown: Tensor


def learn_digits(level: str, seed: int) -> Subject:
    """Trains a small network on eight digits."""
    torch.manual_seed(seed)
    images, labels = load_digits()
    x, left_out = images.float() / 255, torch.tensor([seed, (seed + 5) % 10])
    is_known = ~torch.isin(labels, left_out)
    known = is_known.nonzero()[:, 0][torch.randperm(int(is_known.sum()))]
    names = labels[is_known].unique()
    size, num_training = LEVELS[level]
    rows = known[:size], known[size : 2 * size], known[2 * size :][:num_training]
    held_out, others, training = ((x[index], torch.searchsorted(names, labels[index])) for index in rows)
    model = train(*training)
    order = torch.cat([torch.randperm(len(rows[2])) for _ in range(max(4, 4000 // len(rows[2])))])
    return Subject(model, [training[0][order]], RECIPE.batch_size, held_out, others, x[~is_known])


def load_lenet5(seed: int) -> Subject:
    """Loads a LeNet-5 of the reproduction, and halves its validation images."""
    recipe = LENET5.recipe
    split = load_split(recipe.data, "validation")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    held_out, others = ((to_inputs(split.images[half]), split.labels[half]) for half in order.chunk(2))
    batches = list(training_batches(load_split(recipe.data, "train"), recipe))
    model = load_network(checkpoint_path(recipe, seed))
    return Subject(model, batches, recipe.batch_size, held_out, others, 1 - others[0][:500])


def measure(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yields what each rule chooses for a network, and how that does on other images."""
    model, held_out = subject.model, [subject.held_out]
    labelled = subject.others, subject.held_out  # images that did not tune, and those that did

    def predict(stats: Any) -> list[stochbn.Prediction]:
        return [stochbn.predict(model, stats, inputs) for inputs, _ in labelled]

    def losses(preds: list[stochbn.Prediction]) -> list[Tensor]:
        right = [pred.probs.gather(1, y[:, None])[:, 0] for pred, (_, y) in zip(preds, labelled, strict=True)]
        return [-each.clamp_min(1e-38).log().double() for each in right]

    is_unknown = torch.arange(len(subject.others[0]) + len(subject.unknown)) >= len(subject.others[0])
    plain = stochbn.tune(model, None, held_out, progress=False)
    reference = losses(predict(plain))
    for family, options in FAMILIES.items():
        fitted = stochbn.fit(model, subject.training, progress=False, batch_size=subject.batch_size, **options)
        found = {"fitted": fitted, "lowest": take_lowest(model, fitted, held_out)}
        found["tune"] = stochbn.tune(model, fitted, held_out, progress=False)
        scale = stochbn.predict(model, fitted, subject.unknown).epistemic.mean()
        for rule, stats in {"plain": plain, **found}.items():
            chosen = plain if rule == "plain" else stats.tuning or stochbn.Tuning()
            known, unknown = predict(stats), stochbn.predict(model, stats, subject.unknown)
            epistemic, own = unknown.epistemic.mean(), losses(known)
            [difference, error], seen = (compare(a, b) for a, b in zip(own, reference, strict=True))
            said = " ".join(chosen.verdict)
            yield {
                "family": family,
                "rule": rule,
                "spread": chosen.spread,
                "temperature": chosen.temperature,
                "nll": float(own[0].mean()),
                "difference_to_plain": difference,
                "standard_error": error,
                "worse": difference > error,  # than the plain network at its temperature
                "worse_where_tuned": seen[0] > seen[1],
                "epistemic": float(epistemic),
                "auroc": float(roc_auc_score(is_unknown, torch.cat([known[0].entropy, unknown.entropy]))),
                "collapsed": rule != "plain" and bool(epistemic < COLLAPSED * scale),
                "says": [word for word, part in SAID.items() if part in said],
                "verdict": chosen.verdict,
            }


def train(x: Tensor, y: Tensor) -> nn.Module:
    """Trains a network by the recipe: Adam with a learning rate that falls to 0, in mini-batches."""
    model = replace(RECIPE, num_classes=int(y.max()) + 1).build_network()
    optimizer = torch.optim.Adam(model.parameters(), RECIPE.learning_rate)
    steps = RECIPE.epochs * (len(x) // RECIPE.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(RECIPE.epochs):
        for index in torch.randperm(len(x))[: len(x) // RECIPE.batch_size * RECIPE.batch_size].split(RECIPE.batch_size):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def take_lowest(model: nn.Module, stats: stochbn.Distribution, held_out: list[tuple[Tensor, Tensor]]) -> Any:
    """Takes the spread where the curve is lowest, whatever the difference."""
    [(x, y)] = held_out
    tried = [replace(stats, tuning=stochbn.Tuning(spread)) for spread in NARROWER + SPREADS + WIDER]
    return min(tried, key=lambda one: stochbn.nll(stochbn.predict(model, one, x, num_samples=8).probs, y).item())


def summarise(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Averages over networks and families, by rule; and counts what must not happen in silence."""
    summary = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == rule]
        summary[rule] = {
            "fits": len(own),
            "nll": sum(row["nll"] for row in own) / len(own),
            "epistemic": sum(row["epistemic"] for row in own) / len(own),
            "auroc": sum(row["auroc"] for row in own) / len(own),
            "collapsed": sum(row["collapsed"] for row in own),
            "collapsed_in_silence": sum(row["collapsed"] and "narrower" not in row["says"] for row in own),
            "worse_than_plain": sum(row["worse"] for row in own),
            "worse_in_silence": sum(row["worse"] and not OPEN & {*row["says"]} for row in own),
            "worse_where_tuned_in_silence": sum(row["worse_where_tuned"] and "plain" not in row["says"] for row in own),
        }
    return summary


if __name__ == "__main__":
    main()
