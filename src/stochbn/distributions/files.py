"""Header and tensors ↔ a safetensors file, written whole or not at all. No pickle."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT_VERSION = 2


def write(path: str | os.PathLike[str], header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a header and tensors as one file."""
    flat = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    header = {"format_version": FORMAT_VERSION, **header}
    write_atomically(path, save(flat, {"stochbn": json.dumps(header)}))


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
    """Reads what `write` wrote; raises `ValueError` for anything else."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError("a directory")
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get("stochbn")
            tensors = {key: file.get_tensor(key) for key in file.keys()} if text else {}  # noqa: SIM118
    except (SafetensorError, IsADirectoryError) as error:
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
