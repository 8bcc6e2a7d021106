"""The commands for a network of your own: `fit`, `tune` and `predict`, from files to files."""

import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

import stochbn
from stochbn.cli.console import console, say
from stochbn.cli.loading import load_data, load_model
from stochbn.cli.options import BatchSize, Device, Dropout, Factory, Inputs, Layers, Link, NumBatches, Samples, Weights
from stochbn.experiments.data.sources import write_atomically


def fit(
    factory: Factory,
    checkpoint: Weights,
    data: Inputs,
    out: Annotated[Path, typer.Option(help="File to write, such as net.sbn.safetensors.")],
    batch_size: BatchSize = None,
    num_batches: NumBatches = None,
    layers: Layers = None,
    dropout: Dropout = False,
    family: Annotated[str, typer.Option(help="factorized, as in the paper, lowrank, or empirical.")] = "factorized",
    size: Annotated[int | None, typer.Option(min=1, help="Factors of lowrank, mini-batches of empirical.")] = None,
    conditioned: Annotated[bool, typer.Option("--conditioned", help="Count inputs into their mini-batch.")] = False,
    device: Device = "cpu",
) -> None:
    """Fits the distribution of your network's batch statistics, in one pass over its training data.

    FACTORY names what builds the network without arguments; the current directory is importable. Data are
    preprocessed as in training: an array `x` in a file, or a factory of a Dataset, a DataLoader or a tensor.

    Example: `stochbn fit nets:build --checkpoint model.pt --data train.npz --batch-size 32 --out net.sbn.safetensors`
    """
    prepare_out(out, checkpoint, data)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"num_batches": num_batches, "layers": layers or None, "dropout": dropout}
    options |= {"family": family, "size": size, "conditioned": conditioned}
    fit_data(model, data, out, console, batch_size=batch_size, **options)


def tune(
    factory: Factory,
    checkpoint: Weights,
    stats: Annotated[Path, typer.Option(help="What `fit` wrote.")],
    data: Annotated[str, typer.Option(help="Held-out inputs x and labels y; as in `fit`.")],
    out: Annotated[Path, typer.Option(help="File to write, such as net.sbn.safetensors.")],
    spread: Annotated[bool, typer.Option(help="Choose the spread, or leave the fitted one.")] = True,
    temperature: Annotated[bool, typer.Option("--temperature", help="Choose a temperature too.")] = False,
    groups: Annotated[int, typer.Option(min=1, help="Groups of layers with a spread of their own.")] = 1,
    samples: Annotated[int, typer.Option(min=2, help="Networks drawn for each spread that is tried.")] = 8,
    dropout: Dropout = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs at a time; changes no result.")] = 128,
    device: Device = "cpu",
) -> None:
    """Chooses how wide the draws are, by the NLL on labelled data that neither training nor the test has seen.

    The file that it writes is used like that of `fit`: `predict --stats` takes the spread and the temperature from it.

    Example: `stochbn tune nets:build --checkpoint model.pt --stats fit.sbn --data val.npz --out net.sbn.safetensors`
    """
    prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"spread": spread, "temperature": temperature, "groups": groups}
    options |= {"num_samples": samples, "dropout": dropout}
    tune_data(model, stats, data, out, console, batch_size=batch_size, **options)


def predict(
    factory: Factory,
    checkpoint: Weights,
    data: Inputs,
    out: Annotated[Path, typer.Option(help="File to write: .csv, or .npz.")],
    stats: Annotated[Path | None, typer.Option(help="What `fit` wrote; without it there is no SBN.")] = None,
    samples: Samples = 50,
    link: Link = "softmax",
    dropout: Dropout = False,
    seed: Annotated[int, typer.Option(help="Makes the draws.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs at a time; changes no result.")] = 128,
    device: Device = "cpu",
) -> None:
    """Predicts with networks drawn around yours, and tells how unsure each prediction is.

    A row for each input: class, confidence, entropy, of that aleatoric and epistemic, and the probabilities. With
    labels (`y` in the file, or the second of what the data set yields) error, NLL and ECE are printed too.

    Example: `stochbn predict nets:build --checkpoint model.pt --stats net.sbn.safetensors --data x.npz --out pred.csv`
    """
    prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"num_samples": samples, "seed": seed, "link": link, "dropout": dropout}
    predict_data(model, stats, data, out, console, batch_size=batch_size, **options)


def fit_data(
    model: nn.Module, data: str, out: Path, console: Console, *, batch_size: int | None, **options: Any
) -> stochbn.Fitted:
    """Fits a network's statistics to training data and saves them; further options are those of `stochbn.fit`.

    Arrays and data sets are shuffled, by a fixed seed, and need a `batch_size`: that of training.
    """
    loader = load_data(data, model, batch_size, shuffle=True)
    stats = stochbn.fit(model, loader, batch_size=batch_size, progress=sys.stderr.isatty(), **options)
    stats.save(out)
    say(f"Fitted {stats}.\nWrote {out}")
    return stats


def tune_data(
    model: nn.Module, stats: Path, data: str, out: Path, console: Console, *, batch_size: int, **options: Any
) -> stochbn.Fitted:
    """Tunes a network's statistics on held-out data with labels and saves them; options are those of `stochbn.tune`."""
    loader = load_data(data, model, batch_size)
    tuned = stochbn.tune(model, stochbn.load(stats), loader, progress=sys.stderr.isatty(), **options)
    tuned.save(out)
    tuning = tuned.tuning
    assert tuning is not None
    table = Table("spread", "temperature", "NLL", title="Tried on the held-out data")
    for row in tuning.curve:
        table.add_row(*(f"{value:.4g}" for value in row))
    console.print(table)
    spread = tuning.spread
    told = ", ".join(f"{k:.3g}" for k in spread.values()) if isinstance(spread, Mapping) else f"{spread:.3g}"
    say(f"Chose spread {told}, temperature {tuning.temperature:.3g}.\nWrote {out}")
    return tuned


def predict_data(
    model: nn.Module, stats: Path | None, data: str, out: Path, console: Console, *, batch_size: int, **options: Any
) -> stochbn.Prediction:
    """Predicts, writes a row an input to a `.csv` or `.npz` file, and prints a summary; labels are scored.

    Without `stats` there is no SBN; further options are those of `stochbn.predict`.
    """
    if out.suffix not in (".csv", ".npz"):
        raise ValueError(f"Expected --out to end in .csv or .npz, got {out}.")
    distribution = stochbn.load(stats) if stats else None
    if distribution is None:
        say("No statistics were given: this is without SBN.")
    loader = load_data(data, model, batch_size)
    if isinstance(loader.sampler, RandomSampler):
        warnings.warn("The DataLoader shuffles: rows follow its order, not that of the data.", stacklevel=2)
    labels: list[Tensor] = []
    prediction = stochbn.predict(model, distribution, _collect(loader, labels), keep_samples=False, **options)
    targets = torch.cat(labels) if labels else None
    _write(out, _columns(prediction) | ({} if targets is None else {"label": targets}))
    say(f"Wrote {out}")
    _summarise(console, prediction, targets)
    return prediction


def prepare_out(out: Path, *inputs: Path | str | None) -> None:
    """Makes the folder of a file to be written, which must not be one of the files to be read."""
    if any(path and Path(path).resolve() == out.resolve() for path in inputs):
        raise ValueError(f"Expected --out to be a file of its own, got an input: {out}.")
    out.parent.mkdir(parents=True, exist_ok=True)


def _collect(loader: "DataLoader[Any]", labels: list[Tensor]) -> Iterator[Any]:
    """Yields what a loader does, and keeps the labels that come with it."""
    for item in tqdm(loader, desc="predict", unit="batch", leave=False, disable=None):
        if isinstance(item, (tuple, list)) and len(item) > 1 and isinstance(item[1], Tensor) and item[1].dim():
            labels.append(item[1].cpu())
        yield item


def _columns(prediction: stochbn.Prediction) -> dict[str, Tensor]:
    if prediction.link == "identity":
        return {"mean": prediction.mean, "std": prediction.std}
    measures = {name: getattr(prediction, name) for name in ("entropy", "aleatoric", "epistemic")}
    if prediction.link == "sigmoid":
        return {**measures, "probs": prediction.probs}
    confidence, predicted = prediction.probs.max(1)
    return {"predicted": predicted, "confidence": confidence, **measures, "probs": prediction.probs}


def _write(path: Path, columns: dict[str, Tensor]) -> None:
    arrays = {name: values.cpu().numpy() for name, values in columns.items()}
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(path, buffer.getvalue())
        return
    flat: dict[str, np.ndarray] = {"index": np.arange(len(arrays["probs" if "probs" in arrays else "mean"]))}
    for name, values in arrays.items():
        if values.ndim > 2:
            raise ValueError(f"Expected --out to end in .npz for {name} of shape {values.shape}, got {path}.")
        flat |= {name: values} if values.ndim == 1 else {f"{name}_{k}": part for k, part in enumerate(values.T)}
    rows = zip(*([f"{value:.9g}" for value in values.tolist()] for values in flat.values()), strict=True)
    write_atomically(path, "".join(f"{','.join(row)}\n" for row in (tuple(flat), *rows)).encode())


def _summarise(console: Console, prediction: stochbn.Prediction, labels: Tensor | None) -> None:
    columns = {name: values.cpu() for name, values in _columns(prediction).items() if name != "probs"}
    shown = {name: v if v.dim() == 1 else v.double().flatten(1).mean(1) for name, v in columns.items()}  # (N,)
    measure = "std" if prediction.link == "identity" else "entropy"
    means = [f"mean {name} {shown[name].mean():.4f}" for name in (measure, "aleatoric", "epistemic") if name in shown]
    if labels is not None and prediction.link == "softmax":
        scores = {"error": stochbn.error, "NLL": stochbn.nll, "ECE": stochbn.ece}
        means += [f"{name} {score(prediction.probs.cpu(), labels):.4f}" for name, score in scores.items()]
    say(f"{len(prediction)} inputs, {prediction.num_samples} draws: {', '.join(means)}")
    table = Table("index", *shown, title="The most uncertain")
    for index in shown[measure].argsort(descending=True)[:5].tolist():
        table.add_row(str(index), *(f"{values[index]:.4g}" for values in shown.values()))
    console.print(table)
