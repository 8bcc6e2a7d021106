"""A network of your own, from files: its factory, its checkpoint and its data.

A factory is named as `package.module:factory`, with the current directory importable.
"""

import importlib
import operator
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from stochbn.cli.console import say
from stochbn.statistics.checks import listing

_DATA_SUFFIXES = (".npz", ".npy", ".safetensors")


def load_model(factory: str | Callable[[], nn.Module], checkpoint: Path, device: str) -> nn.Module:
    """Builds a network with the weights of a checkpoint, which must be its own to the last key."""
    model = cast(nn.Module, _make(factory, (nn.Module,), "an nn.Module"))
    state = _read_state(checkpoint)
    for prefix in ("module.", "_orig_mod."):  # of DistributedDataParallel and torch.compile
        if all(key.startswith(prefix) for key in state) and not any(k.startswith(prefix) for k in model.state_dict()):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
            say(f"Stripped the prefix {prefix!r} from the checkpoint's keys.")
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
        raise ValueError(f"Expected a saved model.state_dict() or safetensors, got {path} ({kind}).") from error
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(key, str) for key in state):
        raise ValueError(f"Expected a state dict in {path}, got {type(state).__name__}.")
    return state


def _read_arrays(path: Path, model: nn.Module) -> TensorDataset:
    if not path.is_file():
        raise ValueError(f"Expected data at {path}, got no such file.")
    try:
        if path.suffix == ".safetensors":
            arrays = safetensors.torch.load_file(path)
        else:
            loaded = np.load(path, allow_pickle=False)
            named = {"x": loaded} if path.suffix == ".npy" else dict(loaded)
            arrays = {name: torch.from_numpy(array) for name, array in named.items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise ValueError(f"Expected arrays of numbers in {path}, got a file that cannot be read ({error}).") from error
    labels = arrays.pop("y", None)
    inputs = arrays.get("x", next(iter(arrays.values())) if len(arrays) == 1 else None)
    if inputs is None or not inputs.dim():
        raise ValueError(f"Expected an array 'x' of inputs in {path}, got {listing(arrays, most=3) or 'no arrays'}.")
    if inputs.is_floating_point():  # numpy's are in float64 unless someone took care
        inputs = inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))
    if labels is None:
        return TensorDataset(inputs)
    if labels.shape[:1] != inputs.shape[:1]:
        raise ValueError(f"Expected a label 'y' for each of {len(inputs)} inputs in {path}, got {list(labels.shape)}.")
    return TensorDataset(inputs, labels if labels.is_floating_point() else labels.long())
