"""Measurements on one network: exact inference, Appendices A and B, the effect of S and of M; and the gallery."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy import stats as scipy_stats
from sklearn.metrics import roc_auc_score  # type: ignore[import-untyped]
from torch import Tensor, nn

import stochbn
from stochbn.experiments.data.splits import Part, Split, to_inputs
from stochbn.experiments.evaluation.inference import fit, infer_exactly, predict, training_batches
from stochbn.experiments.evaluation.protocols import Curve, Protocol
from stochbn.experiments.files import DRAW_SEED, PARTS, File, average, pack, unpack
from stochbn.experiments.training.recipes import Recipe
from stochbn.statistics.layers import find_layers
from stochbn.statistics.mini_batches import mini_batches
from stochbn.statistics.normalization import Answering, BatchNormalization
from stochbn.statistics.twin import make_twin

# How many inputs, drawn at random: of each part for exact inference (at most a quarter), and of the training data for
# the bound (at most a tenth).
NUM_EXACT = 500
NUM_BOUND = 500
SAMPLE_COUNTS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
_NUM_SHOWN_CHANNELS = 3
_GALLERY_SIZE = 8


def measure(
    network: nn.Module, recipe: Recipe, splits: Mapping[str, Split], protocol: Protocol, *, console: Console
) -> File:
    """Measures everything but the gallery, as far as the protocol has it."""
    curve, training, name = protocol.curve, splits["train"], f"{recipe.name} seed 0"
    parts = {part: splits[part][choose_rows(splits[part], curve.num_inputs)] for part in PARTS}
    header: dict[str, Any] = {"network": name, "num_curve": {part: len(split) for part, split in parts.items()}}
    tensors: dict[str, Tensor] = {"labels": splits["test"].labels.to(torch.uint8)}

    def say(what: str) -> None:
        console.print(f"{name}: {what}", highlight=False)

    if protocol.has_appendices:
        options: dict[str, Any] = {"num_samples": protocol.num_samples, "progress": console.is_terminal}
        say("batch statistics against r(μ) and r(σ), Appendix B")
        statistics, header["statistics"] = _compare_statistics(network, training, recipe)
        num_exact = min(NUM_EXACT, len(splits["test"]) // 4)
        say(f"exact inference on {num_exact} inputs of each part, eq. 3")
        tensors |= statistics | _infer_exactly(network, recipe, splits, num_exact, **options)
        say("the lower bound and its gap, Appendix A")
        header["bound"] = _bound(network, recipe, training, **options)
        say("the number of samples S")
        stats = fit(network, training, recipe, progress=console.is_terminal)
        header["by_samples"] = _by_samples(network, stats, parts, progress=console.is_terminal)
    say("the mini-batch size M")
    training = training[choose_rows(training, curve.num_fit_inputs or len(training))]
    header["by_batch_size"] = _by_batch_size(network, recipe, training, parts, curve, progress=console.is_terminal)
    return File(header, tensors)


def _compare_statistics(
    network: nn.Module, training: Split, recipe: Recipe
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collects every mini-batch's statistics and measures how far r(μ) and r(σ) are from them, by channel.

    The Kolmogorov-Smirnov distance is between the empirical distribution and the fitted Normal, of the batch mean and
    of log(σ² + ε): the distance of σ to its Log-normal is the same, since it does not change under the logarithm. A
    channel that never varies has no distance (NaN).
    """
    twin, layers = make_twin(network), find_layers(network)
    num_batches = 0
    normalization = BatchNormalization(layers)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), Answering(normalization.answer):
        torch.manual_seed(DRAW_SEED)  # of augmentation, as in the fit
        batches = training_batches(training, recipe)
        for inputs, count, _ in mini_batches(batches, batch_size=recipe.mini_batch_size):
            normalization.num_batches = count
            twin(inputs)
            num_batches += count
        observed = normalization.observed.take()
    tensors: dict[str, Tensor] = {}
    for name in layers:
        values = observed[name].double()  # (B, 2, C)
        centre, std = values.mean(0), values.std(0)
        distances = np.full(centre.shape, np.nan)
        for kind, channel in zip(*np.nonzero(std.numpy() > 0), strict=True):
            standardised = (values[:, kind, channel] - centre[kind, channel]) / std[kind, channel]
            distances[kind, channel] = scipy_stats.kstest(standardised, "norm").statistic
        channels = torch.linspace(0, values.shape[2] - 1, _NUM_SHOWN_CHANNELS).long()
        found = {"ks": torch.from_numpy(distances), "channels": channels, "observed": values[:, :, channels].float()}
        found |= {"centre": centre[:, channels], "std": std[:, channels]}
        tensors |= {f"statistics/{name}/{kind}": tensor for kind, tensor in found.items()}
    return tensors, {"layers": list(layers), "num_batches": num_batches, "batch_size": recipe.mini_batch_size}


def _infer_exactly(
    network: nn.Module, recipe: Recipe, splits: Mapping[str, Split], num_inputs: int, **options: Any
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for part in PARTS:
        index = choose_rows(splits[part], num_inputs)
        prediction = infer_exactly(network, recipe, splits["train"], splits[part][index], keep_samples=False, **options)
        tensors |= pack(prediction, "exact", part) | {f"exact/{part}/index": index}
    return tensors


def _bound(network: nn.Module, recipe: Recipe, training: Split, *, num_samples: int, progress: bool) -> dict[str, Any]:
    """Estimates the bound on training examples that are not among the mini-batches', before and after training."""
    count = min(NUM_BOUND, len(training) // 10)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(DRAW_SEED))
    examples, rest = training[order[:count]], training[order[count:]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = recipe.build_network()
    sizes: dict[str, Any] = {"num_samples": num_samples, "batch_size": recipe.mini_batch_size}
    inputs, options = to_inputs(examples.images), {"seed": DRAW_SEED, "progress": progress, **sizes}
    found: dict[str, Any] = {
        stage: stochbn.lower_bound(model, training_batches(rest, recipe), inputs, examples.labels, **options).summary()
        for stage, model in (("before", untrained), ("after", network))
    }
    return found | {"num_examples": len(examples)} | sizes


def _by_samples(
    network: nn.Module, stats: stochbn.Distribution, parts: Mapping[Part, Split], *, progress: bool
) -> list[dict[str, float]]:
    """Scores averages over S of the same 100 draws: the mean score of up to 10 such averages that share no draw."""
    count = max(SAMPLE_COUNTS)
    samples = {}
    for part, split in parts.items():
        found = predict(network, stats, split, num_samples=count, keep_samples=True, progress=progress).samples
        assert found is not None
        samples[part] = found
    rows = []
    for size in SAMPLE_COUNTS:
        blocks = [
            _scores({part: draws[i * size : (i + 1) * size].mean(0) for part, draws in samples.items()}, parts)
            for i in range(min(10, count // size))
        ]
        means = {key: sum(block[key] for block in blocks) / len(blocks) for key in blocks[0]}
        rows.append({"num_samples": size, "num_averages": len(blocks), **means})
    return rows


def _by_batch_size(
    network: nn.Module, recipe: Recipe, training: Split, parts: Mapping[Part, Split], curve: Curve, *, progress: bool
) -> list[dict[str, float]]:
    options: dict[str, Any] = {"num_samples": curve.num_samples, "progress": progress}
    rows = []
    for size in curve.batch_sizes:
        stats = fit(network, training, recipe, batch_size=size, progress=progress)
        probs = {part: predict(network, stats, split, **options).probs for part, split in parts.items()}
        rows.append({"batch_size": size, **_scores(probs, parts)})
    return rows


def choose_rows(split: Split, count: int) -> Tensor:
    """Draws rows of a split at random, always the same ones: a data set may be ordered, as MNIST's test images are."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(DRAW_SEED))
    return order[:count].sort().values


def _scores(probs: Mapping[Part, Tensor], parts: Mapping[Part, Split]) -> dict[str, float]:
    labels = parts["test"].labels
    known, unknown = (stochbn.entropy(probs[part]) for part in PARTS)
    is_unknown = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return {
        "nll": stochbn.nll(probs["test"], labels).item(),
        "error": stochbn.error(probs["test"], labels).item(),
        "entropy_test": known.mean().item(),
        "entropy_out_of_domain": unknown.mean().item(),
        "auroc": float(roc_auc_score(is_unknown, torch.cat([known, unknown]))),
    }


def pick_gallery(files: Sequence[File], splits: Mapping[str, Split]) -> File:
    """Picks the inputs that the plain networks with SBN together are surest and least sure of."""
    tensors: dict[str, Tensor] = {}
    for part in PARTS:
        probs, _ = average([unpack(file, "sbn", part) for file in files])
        entropy = stochbn.entropy(probs)
        order = entropy.argsort()
        for group, index in (("certain", order[:_GALLERY_SIZE]), ("uncertain", order.flip(0)[:_GALLERY_SIZE])):
            found = {"images": splits[part].images[index], "entropy": entropy[index].float()}
            found |= {"predicted": probs[index].argmax(1).to(torch.uint8)}
            found |= {"labels": splits[part].labels[index].to(torch.uint8)}
            tensors |= {f"gallery/{group} {part}/{kind}": tensor for kind, tensor in found.items()}
    header = {
        "method": f"Deep Ensembles ({len(files)}) + SBN" if len(files) > 1 else "SBN",
        "classes": splits["test"].classes,
        "out_of_domain_classes": splits["out-of-domain"].classes,
    }
    return File({"gallery": header}, tensors)
