"""A distribution ↔ one safetensors file, written whole or not at all and checked in full when it is read. No pickle.

The header is JSON under the key `stochbn`: `format_version`, the family, what the fit was made of, the tuning, and of
each layer its name, ε and the weights of its moments. The tensors are `{layer}.mean` and `{layer}.deviation`, (2, C)
in float64, and the family's own array, (…, 2, ΣC) in float32.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stochbn.distributions.base import Distribution, Layer, common_fields
from stochbn.distributions.empirical import Empirical
from stochbn.distributions.factorized import Factorized
from stochbn.distributions.lowrank import LowRank
from stochbn.distributions.tuning import Score, Tuning
from stochbn.statistics.moments import Moments

FORMAT_VERSION = 2
FAMILIES: dict[str, type[Distribution]] = {family.family: family for family in (Factorized, LowRank, Empirical)}


def save(stats: Distribution, path: str | os.PathLike[str]) -> None:
    """Writes a distribution to a file, whole or not at all; `stats.save(path)` calls it."""
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
    flat = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(flat, {"stochbn": json.dumps(header)}))


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Distribution:
    """Reads a distribution that `stats.save(path)` wrote, and checks all of it before use.

    Raises:
        ValueError: The file is truncated, not ours, of another format version, or holds impossible numbers.

    Examples:
        >>> import stochbn, tempfile
        >>> moments = Moments.of(torch.tensor([[[0.0], [0.0]], [[1.0], [0.5]]], dtype=torch.float64))
        >>> stats = Factorized({"bn": Layer(1e-5, moments)}, batch_size=16, num_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stats.save(f"{folder}/net.sbn.safetensors")
        ...     stochbn.load(f"{folder}/net.sbn.safetensors")
        Factorized(1 layers, 1 channels, batch_size=16, num_batches=2)
    """
    header, tensors = read(path, device)
    try:
        return _parse(header, tensors)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"Expected a sound stochbn file, got {path}: {reason}. Save it again.") from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file so that a reader, or a crash at any moment, meets the old or the new one, never a part."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str], device: torch.device | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header and the tensors of a file that `save` wrote; raises `ValueError` for anything else."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError("a directory")
        with safetensors.safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get("stochbn")
            tensors = {key: file.get_tensor(key) for key in file.keys()} if text else {}  # noqa: SIM118
    except (safetensors.SafetensorError, IsADirectoryError) as error:
        raise ValueError(
            f"Expected a file written by stats.save, got {path}, which is truncated or not safetensors ({error}). "
            "Save it again."
        ) from error
    if text is None:
        raise ValueError(
            f"Expected a file written by stats.save, got {path}, a safetensors file of something else. "
            "Model weights go to model.load_state_dict."
        )
    try:
        header = json.loads(text)
        version = header["format_version"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"Expected a sound stochbn file, got {path} with a broken header. Save it again.") from error
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"Expected a stochbn file of format {FORMAT_VERSION}, got {path} of format {version!r}. "
            "Upgrade stochbn, or fit and save again."
        )
    return header, tensors


def _require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"impossible {what}")


def _parse(header: dict[str, Any], tensors: dict[str, Tensor]) -> Distribution:
    if header["family"] not in FAMILIES:
        raise ValueError(f"unknown family {header['family']!r}")
    family = FAMILIES[header["family"]]
    batch_size, num_batches, excluded = header["batch_size"], header["num_batches"], header["excluded"]
    _require(type(batch_size) is int and batch_size >= 2, f"batch_size {batch_size!r}")
    _require(type(num_batches) is int and num_batches >= 2, f"num_batches {num_batches!r}")
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
        header["tuning"] and _parse_tuning(header["tuning"]),
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
        _require(all(type(v) in (int, float) and 0 <= v < math.inf for v in numbers), f"numbers in layer {name!r}")
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
    spread, noise = found["spread"], found.get("noise")
    numbers = [*(spread.values() if isinstance(spread, dict) else [spread]), found["temperature"]]
    if not all(type(number) in (int, float) for number in [*numbers, *([] if noise is None else [noise])]):
        raise ValueError(f"impossible tuning {numbers}")
    if "scores" in found:
        scores = tuple(Score(**{key: _parse_number(value) for key, value in row.items()}) for row in found["scores"])
    else:  # of version 0.1.0, which kept no more
        scores = tuple(Score(float(k), float(t), float(loss)) for k, t, loss in found["curve"])
    verdict = tuple(map(str, found.get("verdict", ())))
    return Tuning(spread, found["temperature"], scores, noise, verdict)


def _parse_number(value: Any) -> Any:
    return value if value is None or isinstance(value, dict) else float(value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
