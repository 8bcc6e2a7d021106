"""A distribution ↔ one safetensors file, written whole or not at all and checked in full when it is read. No pickle.

The header is JSON under the key `stochbn`: `format_version`, the family, what the fit was made of, the tuning, and of
each layer its name, ε and the weights of its moments. The tensors are `{layer}.mean` and `{layer}.deviation`, (2, C)
in float64, and the family's own array, (…, 2, ΣC) in float32. Files of format 2, which 0.1.0 wrote, lack the checksum.
"""

import os
import reprlib
import sys
from typing import Any

import torch
from torch import Tensor

from stochbn.distributions import storage
from stochbn.distributions.base import Distribution, Layer, common_fields
from stochbn.distributions.empirical import Empirical
from stochbn.distributions.factorized import Factorized
from stochbn.distributions.lowrank import LowRank
from stochbn.distributions.tuning import Score, Spread, Tuning
from stochbn.statistics.moments import Moments

FORMAT_VERSION = 3
WITHOUT_CHECKSUM = 2
FAMILIES: dict[str, type[Distribution]] = {family.family: family for family in (Factorized, LowRank, Empirical)}


def save(stats: Distribution, path: str | os.PathLike[str]) -> None:
    """Writes a distribution to a file, whole or not at all; `stats.save(path)` calls it."""
    storage.write(path, "stochbn", *pack(stats))


def pack(stats: Distribution) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the header and the tensors of a distribution's file."""
    layers = []
    tensors = {}
    for name, layer in stats.layers.items():
        moments = layer.moments
        layers.append({"name": name, "eps": layer.eps, "weight": moments.weight, "weight_sq": moments.weight_sq})
        tensors[f"{name}.mean"], tensors[f"{name}.deviation"] = moments.mean, moments.deviation
    if stats.array:
        tensors[stats.array] = getattr(stats, stats.array)
    header = {
        "format_version": FORMAT_VERSION,
        "family": stats.family,
        "batch_size": stats.batch_size,
        "num_batches": stats.num_batches,
        "excluded": stats.excluded,
        "dropout": stats.dropout,
        "conditioned": stats.conditioned,
        "tuning": stats.tuning and stats.tuning.to_dict(),
        "layers": layers,
    }
    return header, tensors


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Distribution:
    """Reads a distribution that `stats.save(path)` wrote, and checks all of it before use.

    Raises:
        ValueError: The file is truncated, damaged, not ours, of another format version, or holds impossible numbers;
            or torch cannot use the device.
        OSError: The file is missing, or may not be read.

    Examples:
        >>> import stochbn, tempfile
        >>> moments = Moments.of(torch.tensor([[[0.0], [0.0]], [[1.0], [0.5]]], dtype=torch.float64))
        >>> stats = Factorized({"bn": Layer(1e-5, moments)}, batch_size=16, num_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stats.save(f"{folder}/net.sbn.safetensors")
        ...     stochbn.load(f"{folder}/net.sbn.safetensors")
        Factorized(1 layers, 1 channels, batch_size=16, num_batches=2)
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # by its kind: unknown, absent, no name at all
        why = storage.brief(error)
        raise ValueError(f"Expected a device that torch can use, got {device!r} ({why}). Pass 'cpu'.") from error
    header, tensors = read(path)
    try:
        return _parse(header, {name: tensor.to(device) for name, tensor in tensors.items()})
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = storage.brief(f"no {error}" if isinstance(error, KeyError) else error)
        raise ValueError(f"Expected a sound stochbn file, got {path}: {reason}. Save it again.") from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header and the tensors of a file that `save` wrote; raises `ValueError` for anything else."""
    try:
        header, tensors, has_checksum = storage.read(path, "stochbn")
        version = header.get("format_version")
    except storage.ForeignError as error:
        raise ValueError(
            f"Expected a file written by stats.save, got {path}, {error}. Model weights go to model.load_state_dict."
        ) from error
    except storage.FileError as error:
        raise ValueError(f"Expected a file written by stats.save, got {path}, {error}. Save it again.") from error
    if type(version) is not int or version not in (WITHOUT_CHECKSUM, FORMAT_VERSION):
        raise ValueError(
            f"Expected a stochbn file of format {FORMAT_VERSION}, got {path} of format {reprlib.repr(version)}. "
            "Upgrade stochbn, or fit and save again."
        )
    if version == FORMAT_VERSION and not has_checksum:
        raise ValueError(f"Expected a sound stochbn file, got {path} without its checksum. Save it again.")
    return header, tensors


def _require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"impossible {what}")


def _parse(header: dict[str, Any], tensors: dict[str, Tensor]) -> Distribution:
    if header["family"] not in FAMILIES:
        raise ValueError(f"unknown family {header['family']!r}")
    family = FAMILIES[header["family"]]
    batch_size, num_batches, excluded = header["batch_size"], header["num_batches"], header["excluded"]
    for name, count in (("batch_size", batch_size), ("num_batches", num_batches)):
        _require(type(count) is int and 2 <= count <= sys.maxsize, f"{name} {reprlib.repr(count)}")
    _require(isinstance(excluded, list) and all(isinstance(name, str) for name in excluded), "excluded layers")
    for flag in ("dropout", "conditioned"):
        _require(type(header[flag]) is bool, flag)
    layers = _parse_layers(header["layers"], tensors)
    _require(bool(layers), "file without layers")
    common = Factorized(
        layers,
        batch_size,
        num_batches,
        tuple(excluded),
        header["dropout"],
        header["conditioned"],
        None if header["tuning"] is None else _parse_tuning(header["tuning"]),
    )
    arrays: dict[str, Any] = {}
    if family.array:
        array = arrays[family.array] = tensors.pop(family.array)
        _require(
            array.dtype == torch.float32 and array.shape[1:] == common.centre.shape and len(array) > 0, family.array
        )
        _require(bool(array.isfinite().all()), f"NaN or Inf in {family.array}")
    _require(not tensors, f"tensors {sorted(tensors)}")
    return family(**common_fields(common), **arrays)


def _parse_layers(entries: list[dict[str, Any]], tensors: dict[str, Tensor]) -> dict[str, Layer]:
    """Takes each layer's tensors out of those of the file."""
    layers: dict[str, Layer] = {}
    for entry in entries:
        name, numbers = entry["name"], (entry["eps"], entry["weight"], entry["weight_sq"])
        _require(isinstance(name, str) and name not in layers, f"layer name {name!r}")
        _require(all(_is_number(v) and v >= 0 for v in numbers), f"numbers in layer {name!r}")
        eps, weight, weight_sq = map(float, numbers)
        _require(0 < weight_sq < weight**2, f"weights in layer {name!r}")
        mean, deviation = tensors.pop(f"{name}.mean"), tensors.pop(f"{name}.deviation")
        _require(mean.dtype == deviation.dtype == torch.float64, f"precision of layer {name!r}")
        _require(mean.dim() == 2 and mean.shape == deviation.shape, f"shape of layer {name!r}")
        _require(mean.shape[0] == 2 and mean.shape[1] > 0, f"shape of layer {name!r}")
        _require(bool((mean.isfinite() & deviation.isfinite()).all()), f"NaN or Inf in layer {name!r}")
        _require(bool((deviation >= 0).all()), f"variance in layer {name!r}")
        layers[name] = Layer(eps, Moments(weight, weight_sq, mean, deviation))
    return layers


def _parse_tuning(found: dict[str, Any]) -> Tuning:
    spread, temperature, noise = found["spread"], found["temperature"], found.get("noise")
    numbers = [temperature, *([] if noise is None else [noise])]
    _require(all(map(_is_number, numbers)), f"tuning {reprlib.repr(numbers)}")
    if "scores" in found:
        scores = tuple(map(_parse_score, found["scores"]))
    else:  # of version 0.1.0, which kept no more
        scores = tuple(_parse_score({"spread": k, "temperature": t, "nll": loss}) for k, t, loss in found["curve"])
    verdict = found.get("verdict", [])
    _require(isinstance(verdict, list) and all(isinstance(sentence, str) for sentence in verdict), "verdict")
    return Tuning(
        _parse_spread(spread), float(temperature), scores, None if noise is None else float(noise), tuple(verdict)
    )


def _parse_spread(spread: Any) -> Spread:
    spreads = spread if isinstance(spread, dict) else {"": spread}
    _require(all(map(_is_number, spreads.values())), f"tuning, spread {reprlib.repr(spread)}")
    floats = {name: float(value) for name, value in spreads.items()}
    return floats if isinstance(spread, dict) else floats[""]


def _parse_score(row: dict[str, Any]) -> Score:
    spread, others = row["spread"], {key: value for key, value in row.items() if key != "spread"}
    # A loss may be infinite, which JSON reads as a float.
    sound = all(value is None or type(value) is float or _is_number(value) for value in others.values())
    _require(sound, f"tuning, score {reprlib.repr(others)}")
    numbers = {key: None if value is None else float(value) for key, value in others.items()}
    return Score(None if spread is None else _parse_spread(spread), **numbers)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """Returns whether a value from JSON is a number that a float can hold; there a whole number has no end."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
