"""The commands for a network of your own: `fit`, `tune`, `predict` and `export`, from files to files."""

import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

import stochbn
from stochbn.cli.console import console, say
from stochbn.cli.loading import load_data, load_model
from stochbn.cli.options import (
    Data,
    Device,
    Dropout,
    Factory,
    InputsAtOnce,
    LinkName,
    Samples,
    Seed,
    Stats,
    StatsOut,
    Threads,
    Weights,
)
from stochbn.distributions.storage import write_atomically
from stochbn.inference.export import OUTPUTS, name_inputs
from stochbn.statistics.calls import without_labels
from stochbn.statistics.items import rows, tensors_in

EXAMPLE_INPUTS = 8  # that an exported file is compared with `predict` on


def fit(
    factory: Factory,
    checkpoint: Weights,
    data: Data,
    out: StatsOut,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="That of training. A DataLoader has its own.")
    ] = None,
    num_batches: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Use only that many mini-batches.")
    ] = None,
    standard_error: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Stop once every centre is this certain, such as 0.01.")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="BatchNorm layers to draw: last, or as 'layer4.*'; repeatable.")
    ] = None,
    family: Annotated[str, typer.Option(help="factorized, as in the paper, lowrank, or empirical.")] = "factorized",
    rank: Annotated[int | None, typer.Option(metavar="N", min=1, help="Factors of lowrank; 10 by default.")] = None,
    num_kept: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Mini-batches of empirical; 256 by default.")
    ] = None,
    conditioned: Annotated[bool, typer.Option("--conditioned", help="Count inputs into their mini-batch.")] = False,
    dropout: Dropout = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Fits the distribution of your network's batch statistics.

    That takes one pass over the training data, and changes nothing in the network. FACTORY names what builds the
    network, without arguments; the current directory is importable. Data are preprocessed as in training: an array `x`
    in a file, or a factory of a Dataset, a DataLoader or a tensor.

    Needs: the network's code, its weights, training data, and the mini-batch size of training.

    Next: `stochbn tune` if you have held-out labels, or else `stochbn predict`.

    Example: `stochbn fit nets:build --checkpoint net.pt --data train.npz --batch-size 32 --out net.sbn.safetensors`
    """
    _prepare_out(out, checkpoint, data)
    model = load_model(factory, checkpoint, device)
    loader = load_data(data, model, batch_size, shuffle=True)
    options: dict[str, Any] = {"batch_size": batch_size, "num_batches": num_batches, "standard_error": standard_error}
    options |= {"layers": "last" if layers == ["last"] else layers or None, "family": family, "rank": rank}
    options |= {"num_kept": num_kept, "conditioned": conditioned, "dropout": dropout}
    stats = stochbn.fit(model, loader, progress=sys.stderr.isatty(), **options)
    stats.save(out)
    say(f"Fitted {stats}.\nWrote {out}")


def tune(
    factory: Factory,
    checkpoint: Weights,
    stats: Annotated[Path, typer.Option(help="What fit wrote.")],
    data: Annotated[str, typer.Option(help="Held-out inputs x with labels y, in the same forms as for fit.")],
    out: StatsOut,
    choose: Annotated[str, typer.Option(help="spread, temperature at the fitted spread, or both.")] = "both",
    link: LinkName = "softmax",
    num_groups: Annotated[
        int, typer.Option(metavar="N", min=1, help="Groups of layers with a spread of their own.")
    ] = 1,
    samples: Annotated[int, typer.Option(metavar="N", min=2, help="Networks drawn for each spread that is tried.")] = 8,
    batch_size: InputsAtOnce = 128,
    dropout: Dropout = False,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Chooses how wide the draws are, and a temperature, by the NLL on held-out data.

    What was fitted stands unless another choice is better by more than one standard error. The plain network is scored
    too: the verdict says which is better. The file that it writes takes the place of the one from `fit`: `predict`
    finds the spread, the temperature and, for regression, the noise in it.

    Needs: what `stochbn fit` wrote, and labelled data seen neither in training nor in the test.

    Next: `stochbn predict --stats` with the new file.

    Example: `stochbn tune nets:build --checkpoint net.pt --stats net.sbn.safetensors --data val.npz --out tuned.sbn.safetensors`
    """  # noqa: E501
    _prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device)
    loader = load_data(data, model, batch_size)
    options: dict[str, Any] = {"choose": choose, "num_groups": num_groups, "num_samples": samples, "dropout": dropout}
    options |= {"link": link}
    tuned = stochbn.tune(model, stochbn.load(stats), loader, progress=sys.stderr.isatty(), **options)
    tuned.save(out)
    tuning = tuned.tuning
    assert tuning is not None
    say(str(tuning))
    chosen = tuning.spread.values() if isinstance(tuning.spread, Mapping) else [tuning.spread]
    spreads = ", ".join(f"{spread:.3g}" for spread in chosen if spread is not None)
    level = f"temperature {tuning.temperature:.3g}" if tuning.noise is None else f"noise {tuning.noise:.3g}"
    say(f"Chose spread {spreads}, {level}.\nWrote {out}")


def predict(
    factory: Factory,
    checkpoint: Weights,
    data: Data,
    out: Annotated[Path, typer.Option(help="File to write: .csv, or .npz; with --ray a folder.")],
    stats: Stats = None,
    samples: Samples = 50,
    link: LinkName = "softmax",
    seed: Seed = 0,
    batch_size: InputsAtOnce = 128,
    dropout: Dropout = False,
    device: Device = "cpu",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Predict on a Ray cluster, or on one started here: --data is Parquet, or a folder of it or of images.",
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Predicts, and says how unsure each prediction is.

    The prediction is that of many networks drawn around yours. A row for each input: class, confidence, entropy with
    its aleatoric and epistemic part, and the probabilities. With labels (`y` in the file, or the second of what the
    data set yields) error, NLL and ECE are printed too.

    Needs: what `stochbn fit` or `stochbn tune` wrote, and inputs preprocessed as in training.

    Next: sort the rows by entropy, and look at the most uncertain before you trust the rest. `stochbn export` if you
    want to predict elsewhere.

    Example: `stochbn predict nets:build --checkpoint net.pt --stats net.sbn.safetensors --data x.npz --out pred.csv`
    """
    options: dict[str, Any] = {"num_samples": samples, "seed": seed, "link": link, "dropout": dropout}
    if ray is not None:
        from stochbn.cli.ray import predict_files

        options |= {"factory": factory, "checkpoint": checkpoint, "stats": stats, "device": device}
        count = predict_files(ray, Path(data), out, batch_size=batch_size, **options)
        say(f"Wrote {out}, {count} rows")
        return
    if out.suffix not in (".csv", ".npz"):
        raise ValueError(f"Expected --out to end in .csv or .npz, got {out}.")
    _prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device)
    distribution = _load_stats(stats)
    loader = load_data(data, model, batch_size)
    if isinstance(loader.sampler, RandomSampler):
        warnings.warn("The DataLoader shuffles: rows follow its order, not that of the data.", stacklevel=2)
    labels: list[Tensor] = []
    prediction = stochbn.predict(model, distribution, _collect(loader, labels), keep_samples=False, **options)
    targets = torch.cat(labels) if labels else None
    scores = _score(prediction, targets)  # before anything is written: labels may be none of the classes
    _write(out, _columns(prediction) | ({} if targets is None else {"label": targets}))
    say(f"Wrote {out}")
    _summarise(prediction, scores)


def export(
    factory: Factory,
    checkpoint: Weights,
    data: Data,
    out: Annotated[Path, typer.Option(help="File to write: .onnx, or .pt2 for torch.")],
    stats: Stats = None,
    samples: Samples = 50,
    link: LinkName = "softmax",
    seed: Seed = 0,
    dropout: Dropout = False,
    threads: Threads = None,
) -> None:
    """Writes one file that predicts with its uncertainty, without this package.

    The network, its draws and the tuning are in it. It takes batches of any size, and returns probabilities and
    entropies (mean and std for regression). A `.onnx` file runs in ONNX Runtime, without torch. A `.pt2` file is
    machine code for this kind of processor, and needs torch. Of the data the first few inputs are used: they have the
    shape that the file is for, and what it returns for them is compared with `predict`.

    Needs: what `stochbn fit` or `stochbn tune` wrote, a few inputs preprocessed as in training, and for .onnx
    `pip install 'stochbn[export]'`.

    Next: run the file on the machine that is to predict; docs/serving.md has the few lines of Python.

    Example: `stochbn export nets:build --checkpoint net.pt --stats net.sbn.safetensors --data x.npz --out net.onnx`
    """
    if out.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"Expected --out to end in .onnx or .pt2, got {out}.")
    _prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, "cpu")
    distribution = _load_stats(stats)
    batch = next(iter(load_data(data, model, EXAMPLE_INPUTS)), None)
    if batch is None:
        raise ValueError(f"Expected at least one input to try the file on, got none in {data}.")
    example = rows(without_labels(batch), 0, EXAMPLE_INPUTS)
    links: dict[str, Any] = {"link": link}
    difference = stochbn.export(
        model, distribution, example, out, num_samples=samples, seed=seed, dropout=dropout, **links
    )
    say(f"Wrote {out}, {_format_size(out.stat().st_size)}")
    plain = stochbn.predict(model, None, example, keep_samples=False, **links)  # has the same shapes
    taken = zip(name_inputs(example), tensors_in(example), strict=True)
    say(f"Takes {', '.join(_format_tensor(name, tensor, len(plain)) for name, tensor in taken)}")
    returned = [_format_tensor(name, getattr(plain, name), len(plain)) for name in OUTPUTS[plain.link]]
    say(f"Returns {', '.join(returned)}")
    say(f"Differs from predict by {difference:.1g} at most, on {len(plain)} inputs")


def _format_tensor(name: str, tensor: Tensor, num_inputs: int) -> str:
    """Describes an argument or a result of a file.

    Examples:
        >>> _format_tensor("probs", torch.zeros(8, 3), 8)
        'probs: float32 (N, 3)'
    """
    sizes = list(map(str, tensor.shape))
    if tensor.dim() and len(tensor) == num_inputs:
        sizes[0] = "N"
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} ({', '.join(sizes)})"


def _format_size(size: int) -> str:
    """Writes a number of bytes.

    Examples:
        >>> _format_size(18_400), _format_size(2_340_000)
        ('18 kB', '2.3 MB')
    """
    return f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _prepare_out(out: Path, *inputs: Path | str | None) -> None:
    """Makes the folder of a file to be written, which must not be one of the files to be read."""
    if any(path and Path(path).resolve() == out.resolve() for path in inputs):
        raise ValueError(f"Expected --out to be a file of its own, got an input: {out}.")
    out.parent.mkdir(parents=True, exist_ok=True)


def _load_stats(path: Path | None) -> stochbn.Distribution | None:
    if path is None:
        say("No statistics were given: this is without SBN.")
        return None
    return stochbn.load(path)


def _collect(loader: "DataLoader[Any]", labels: list[Tensor]) -> Iterator[Any]:
    """Yields what a loader does, and keeps the labels that come with it."""
    for item in tqdm(loader, desc="predict", unit="batch", leave=False, disable=None):
        if isinstance(item, (tuple, list)) and len(item) > 1 and isinstance(item[1], Tensor) and item[1].dim():
            labels.append(item[1].cpu())
        yield item


def _columns(prediction: stochbn.Prediction) -> dict[str, Tensor]:
    if prediction.link == "identity":
        total = {} if prediction.noise is None else {"total_std": prediction.total_std}
        return {"mean": prediction.mean, "std": prediction.std, **total}
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


def _score(prediction: stochbn.Prediction, labels: Tensor | None) -> list[str]:
    if labels is None or prediction.link != "softmax":
        return []
    scores = {"error": stochbn.error, "NLL": stochbn.nll, "ECE": stochbn.ece}
    return [f"{name} {score(prediction.probs.cpu(), labels):.4f}" for name, score in scores.items()]


def _summarise(prediction: stochbn.Prediction, scores: list[str]) -> None:
    columns = {name: values.cpu() for name, values in _columns(prediction).items() if name != "probs"}
    shown = {name: v if v.dim() == 1 else v.double().flatten(1).mean(1) for name, v in columns.items()}  # (N,)
    measure = "std" if prediction.link == "identity" else "entropy"
    means = [f"mean {name} {shown[name].mean():.4f}" for name in (measure, "aleatoric", "epistemic") if name in shown]
    say(f"{len(prediction)} inputs, {prediction.num_samples} draws: {', '.join([*means, *scores])}")
    table = Table("index", *shown, title="The most uncertain")
    for index in shown[measure].argsort(descending=True)[:5].tolist():
        table.add_row(str(index), *(f"{values[index]:.4g}" for values in shown.values()))
    console.print(table)
