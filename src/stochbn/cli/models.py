"""SBN for a network of your own, from files: a factory, its checkpoint and data → statistics or predictions.

The factory is named as `package.module:factory`, with the current directory importable.
"""

import importlib
import io
import operator
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from tqdm import tqdm

import stochbn
from stochbn.experiments.data.sources import DataError, write_atomically
from stochbn.experiments.training.checkpoints import CheckpointError
from stochbn.statistics.checks import listing

_DATA_SUFFIXES = (".npz", ".npy", ".safetensors")


def fit_data(
    model: nn.Module, data: str, out: Path, console: Console, *, batch_size: int | None, **options: Any
) -> stochbn.Distribution:
    """Fits a network's statistics to training data and saves them; further options are those of `stochbn.fit`.

    Arrays and data sets are shuffled, by a fixed seed, and need a `batch_size`: that of training.
    """
    loader = _load_data(data, model, batch_size, shuffle=True)
    stats = stochbn.fit(model, loader, batch_size=batch_size, progress=sys.stderr.isatty(), **options)
    stats.save(out)
    _say(console, f"Fitted {stats}.\nWrote {out}")
    return stats


def tune_data(
    model: nn.Module, stats: Path, data: str, out: Path, console: Console, *, batch_size: int, **options: Any
) -> stochbn.Distribution:
    """Tunes a network's statistics on held-out data with labels and saves them; options are those of `stochbn.tune`."""
    loader = _load_data(data, model, batch_size)
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
    _say(console, f"Chose spread {told}, temperature {tuning.temperature:.3g}.\nWrote {out}")
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
        _say(console, "No statistics were given: this is without SBN.")
    loader = _load_data(data, model, batch_size)
    if isinstance(loader.sampler, RandomSampler):
        warnings.warn("The DataLoader shuffles: rows follow its order, not that of the data.", stacklevel=2)
    labels: list[Tensor] = []
    prediction = stochbn.predict(model, distribution, _collect(loader, labels), keep_samples=False, **options)
    targets = torch.cat(labels) if labels else None
    _write(out, _columns(prediction) | ({} if targets is None else {"label": targets}))
    _say(console, f"Wrote {out}")
    _summarise(console, prediction, targets)
    return prediction


def prepare_out(out: Path, *inputs: Path | str | None) -> None:
    """Makes the folder of a file to be written, which must not be one of the files to be read."""
    if any(path and Path(path).resolve() == out.resolve() for path in inputs):
        raise ValueError(f"Expected --out to be a file of its own, got an input: {out}.")
    out.parent.mkdir(parents=True, exist_ok=True)


def load_model(factory: str, checkpoint: Path, device: str, console: Console) -> nn.Module:
    """Builds a network with the weights of a checkpoint, which must be its own to the last key."""
    model = cast(nn.Module, _make(factory, (nn.Module,), "an nn.Module"))
    state = _read_state(checkpoint)
    for prefix in ("module.", "_orig_mod."):  # of DistributedDataParallel and torch.compile
        if all(key.startswith(prefix) for key in state) and not any(k.startswith(prefix) for k in model.state_dict()):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
            _say(console, f"Stripped the prefix {prefix!r} from the checkpoint's keys.")
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # sizes
        raise CheckpointError(f"Expected weights of {factory}, got others in {checkpoint}: {error}") from error
    faults = [("missing", result.missing_keys), ("unexpected", result.unexpected_keys)]
    if found := "; ".join(f"{kind} {listing(keys, most=3)}" for kind, keys in faults if keys):
        raise CheckpointError(f"Expected the keys of {factory}, got other ones in {checkpoint}: {found}.")
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Expected a device that torch can use, got {device!r} ({error}).") from error


def _load_data(reference: str, model: nn.Module, batch_size: int | None, shuffle: bool = False) -> "DataLoader[Any]":
    """Reads arrays, or calls a factory of data, and makes a loader of them; a DataLoader is taken as it is."""
    data: Any
    if Path(reference).suffix in _DATA_SUFFIXES:
        data = _read_arrays(Path(reference), model)
    elif ":" in reference:
        data = _make(reference, (Dataset, DataLoader, Tensor), "a Dataset, a DataLoader or a tensor")
    else:
        raise DataError(f"Expected a file in {', '.join(_DATA_SUFFIXES)} or package.module:factory, got {reference!r}.")
    if isinstance(data, DataLoader):
        return data
    if batch_size is None:
        raise ValueError("Expected --batch-size, the mini-batch size of training, as the data come without one.")
    data = TensorDataset(data) if isinstance(data, Tensor) else data
    shuffle = shuffle and not isinstance(data, IterableDataset)
    return DataLoader(data, batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(0))


def _make(reference: str, kinds: tuple[type, ...], wanted: str) -> object:
    made = _load_object(reference)
    if not isinstance(made, kinds) and callable(made):
        try:
            made = made()
        except Exception as error:
            raise ValueError(f"Expected {reference}() to succeed, got {type(error).__name__}: {error}") from error
    if not isinstance(made, kinds):
        raise TypeError(f"Expected {reference} to be or to return {wanted}, got {type(made).__name__}.")
    return made


def _load_object(reference: str) -> Any:
    """Imports `package.module:attribute`, from the current directory too.

    Example:
        >>> _load_object("math:pi")
        3.141592653589793
    """
    name, _, attribute = reference.partition(":")
    if not name or not attribute:
        raise ValueError(f"Expected package.module:factory, got {reference!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # it stays: what the factory returns may import later
    try:
        module = importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ImportError(f"Expected a module {name!r}, got none in this folder or among packages.") from error
        raise ImportError(f"Expected to import {name!r}, got {type(error).__name__}: {error}") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ImportError(f"Expected {attribute!r} in {name!r}, got a module without it.") from error


def _read_state(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"Expected a checkpoint at {path}, got none.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = type(error).__name__  # torch's own message advises to load what may be harmful
        raise CheckpointError(f"Expected a saved model.state_dict() or safetensors, got {path} ({kind}).") from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"Expected a state dict in {path}, got {type(state).__name__}.")
    return state


def _read_arrays(path: Path, model: nn.Module) -> TensorDataset:
    if not path.is_file():
        raise DataError(f"Expected data at {path}, got no such file.")
    try:
        if path.suffix == ".safetensors":
            arrays = safetensors.torch.load_file(path)
        else:
            loaded = np.load(path, allow_pickle=False)
            named = {"x": loaded} if path.suffix == ".npy" else dict(loaded)
            arrays = {name: torch.from_numpy(array) for name, array in named.items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise DataError(f"Expected arrays of numbers in {path}, got a file that cannot be read ({error}).") from error
    labels = arrays.pop("y", None)
    inputs = arrays.get("x", next(iter(arrays.values())) if len(arrays) == 1 else None)
    if inputs is None or not inputs.dim():
        raise DataError(f"Expected an array 'x' of inputs in {path}, got {listing(arrays, most=3) or 'no arrays'}.")
    if inputs.is_floating_point():  # numpy's are in float64 unless someone took care
        inputs = inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))
    if labels is None:
        return TensorDataset(inputs)
    if labels.shape[:1] != inputs.shape[:1]:
        raise DataError(f"Expected a label 'y' for each of {len(inputs)} inputs in {path}, got {list(labels.shape)}.")
    return TensorDataset(inputs, labels if labels.is_floating_point() else labels.long())


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
    _say(console, f"{len(prediction)} inputs, {prediction.num_samples} draws: {', '.join(means)}")
    table = Table("index", *shown, title="The most uncertain")
    for index in shown[measure].argsort(descending=True)[:5].tolist():
        table.add_row(str(index), *(f"{values[index]:.4g}" for values in shown.values()))
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
