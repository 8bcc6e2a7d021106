"""A network of your own, from files: its factory, its checkpoint and its data.

A factory is named as `package.module:factory`, with the current directory importable.
"""

import copy
import importlib
import operator
import os
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import stochbn
from stochbn.cli.console import say
from stochbn.statistics.checks import listing

_DATA_SUFFIXES = (".npz", ".npy", ".safetensors")


def load_model(factory: str | Callable[[], nn.Module], checkpoint: Path, device: str) -> nn.Module:
    """Builds a network with the weights of a checkpoint, which must be its own to the last key."""
    model = cast(nn.Module, _make(factory, (nn.Module,), "an nn.Module"))
    state = _strip_prefix(_read_state(checkpoint), model, checkpoint)
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # sizes
        raise ValueError(f"Expected weights of {factory}, got others in {checkpoint}: {error}") from error
    faults = [("missing", result.missing_keys), ("unexpected", result.unexpected_keys)]
    if found := "; ".join(f"{kind} {listing(keys, most=3)}" for kind, keys in faults if keys):
        raise ValueError(f"Expected the keys of {factory}, got other ones in {checkpoint}: {found}.")
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Expected a device that torch can use, got {device!r} ({error}).") from error


def load_models(factory: str, checkpoints: Sequence[Path], device: str) -> list[nn.Module]:
    """Builds a network for each checkpoint, all by one factory."""
    if len({path.resolve() for path in checkpoints}) < len(checkpoints):
        given = ", ".join(map(str, checkpoints))
        raise ValueError(f"Expected another --checkpoint for each network of an ensemble, got one twice: {given}.")
    models: list[nn.Module] = []
    for path in checkpoints:
        model = load_model(factory, path, device)
        # A factory may be an object, or return the same one again, which the next weights would overwrite.
        models.append(copy.deepcopy(model) if len(checkpoints) > 1 else model)
    return models


def load_stats(paths: Sequence[Path] | None, checkpoints: Sequence[Path]) -> list[stochbn.Distribution] | None:
    """Reads what `fit` or `tune` wrote for each network, in the networks' order; None if nothing was given."""
    if not paths:
        say("No statistics were given: this is without SBN.")
        return None
    if len(paths) != len(checkpoints):
        raise ValueError(
            f"Expected a --stats for each --checkpoint, in the same order, got {len(paths)} for {len(checkpoints)}."
        )
    return [stochbn.load(path) for path in paths]


def load_data(reference: str, model: nn.Module, batch_size: int | None, shuffle: bool = False) -> "DataLoader[Any]":
    """Reads arrays, or calls a factory of data, and makes a loader of them; a DataLoader is taken as it is."""
    data: Any
    if Path(reference).suffix in _DATA_SUFFIXES:
        data = _read_arrays(Path(reference), model)
    elif ":" in reference:
        data = _make(reference, (Dataset, DataLoader, Tensor), "a Dataset, a DataLoader or a tensor")
    else:
        raise ValueError(
            f"Expected a file in {', '.join(_DATA_SUFFIXES)} or package.module:factory, got {reference!r}."
        )
    if isinstance(data, DataLoader):
        return data
    if batch_size is None:
        raise ValueError("Expected --batch-size, the mini-batch size of training, as the data come without one.")
    data = TensorDataset(data) if isinstance(data, Tensor) else data
    shuffle = shuffle and not isinstance(data, IterableDataset)
    return DataLoader(data, batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(0))


def _make(reference: str | Callable[[], object], kinds: tuple[type, ...], wanted: str) -> object:
    made: Any = _load_object(reference) if isinstance(reference, str) else reference
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

    Examples:
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
        raise ValueError(f"Expected a checkpoint at {path}, got none.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = type(error).__name__  # torch's own message advises to load what may be harmful
        raise ValueError(
            f"Expected a saved model.state_dict() or safetensors, got {path} ({kind}). Save the weights alone: "
            "torch.save(model.state_dict(), 'net.pt')."
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise ValueError(f"Expected a state dict in {path}, got {type(state).__name__}.")
    return state


def _strip_prefix(state: Mapping[str, Any], model: nn.Module, path: Path) -> Mapping[str, Any]:
    """Takes away what wrappers put in front of a network's keys, and what they hold besides the network.

    Lightning's modules call it by an attribute, often `model.`; DataParallel adds `module.`, and torch.compile
    `_orig_mod.`.
    """
    # Old checkpoints have no counters, and torch does without.
    own = [key for key in model.state_dict() if not key.endswith("num_batches_tracked")]
    candidates = [key.removesuffix(own[0]) for key in state if key.endswith(f".{own[0]}")] if own else []
    prefixes = [prefix for prefix in candidates if all(f"{prefix}{key}" in state for key in own)]
    if not prefixes or own[0] in state:
        return state
    if len(prefixes) > 1:
        raise ValueError(
            f"Expected the weights of one network in {path}, got several: {listing(prefixes, most=3)}. Save those of "
            "one: torch.save(model.state_dict(), 'net.pt')."
        )
    (prefix,) = prefixes
    others = [key for key in state if not key.startswith(prefix)]
    say(
        f"Stripped the prefix {prefix!r} from the checkpoint's keys"
        + (f", and left out {listing(others, most=3)}." if others else ".")
    )
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


class Arrays(TensorDataset):
    """Inputs and, if there are any, labels from a file, with what inputs and classes are called in it."""

    def __init__(self, *tensors: Tensor, ids: list[str] | None, classes: list[str] | None) -> None:
        super().__init__(*tensors)
        self.ids = ids
        self.classes = classes


def _read_arrays(path: Path, model: nn.Module) -> Arrays:
    if not path.is_file():
        raise ValueError(f"Expected data at {path}, got no such file.")
    arrays: dict[str, Any]
    try:
        if path.suffix == ".safetensors":
            arrays = dict(safetensors.torch.load_file(path))
        else:
            loaded = np.load(path, allow_pickle=False)
            arrays = {"x": loaded} if path.suffix == ".npy" else dict(loaded)
        ids, classes = (_read_names(arrays.pop(name, None)) for name in ("ids", "classes"))
        labels = arrays.pop("y", None)
        inputs = arrays.get("x", next(iter(arrays.values())) if len(arrays) == 1 else None)
        inputs, labels = (torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in (inputs, labels))
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise ValueError(f"Expected arrays of numbers in {path}, got a file that cannot be read ({error}).") from error
    if inputs is None or not inputs.dim():
        raise ValueError(f"Expected an array 'x' of inputs in {path}, got {listing(arrays, most=3) or 'no arrays'}.")
    if inputs.is_floating_point():  # numpy's are in float64 unless someone took care
        inputs = inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))
    if ids is not None and len(ids) != len(inputs):
        raise ValueError(f"Expected one of 'ids' for each of {len(inputs)} inputs in {path}, got {len(ids)}.")
    if labels is not None and labels.shape[:1] != inputs.shape[:1]:
        raise ValueError(f"Expected a label 'y' for each of {len(inputs)} inputs in {path}, got {list(labels.shape)}.")
    _check_images(path, model, inputs)
    if labels is None:
        return Arrays(inputs, ids=ids, classes=classes)
    return Arrays(inputs, labels if labels.is_floating_point() else labels.long(), ids=ids, classes=classes)


def _read_names(array: Any) -> list[str] | None:
    """Reads a list of text or of whole numbers, such as file names, ids or names of classes."""
    if array is None:
        return None
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.kind not in "iuUS":
        raise ValueError(f"names as an array {list(array.shape)} of {array.dtype}, not a list of text")
    return [str(name) for name in array.astype(str).tolist()]


def _check_images(path: Path, model: nn.Module, inputs: Tensor) -> None:
    """Says how to convert images that a network refuses since they are as files have them: bytes, channels last."""
    steps, wrong = "x", []
    if inputs.dim() == 4 and inputs.shape[3] in (1, 3, 4) and inputs.shape[1] not in (1, 3, 4):
        steps, wrong = f"{steps}.transpose(0, 3, 1, 2)", ["channels last"]
    if inputs.dtype == torch.uint8:
        steps, wrong = f"{steps}.astype('float32') / 255", [*wrong, "bytes"]
    if not wrong or not len(inputs):
        return
    try:  # a network may take them as they are
        stochbn.predict(model, None, inputs[:2], link="identity")
    except RuntimeError as error:
        raise ValueError(
            f"Expected images (N, C, H, W) preprocessed as in training, got {' and '.join(wrong)} in {path}: "
            f"{tuple(inputs.shape)} in {str(inputs.dtype).removeprefix('torch.')}. Convert them before np.savez, "
            f"x = {steps}, and normalise as in training."
        ) from error
