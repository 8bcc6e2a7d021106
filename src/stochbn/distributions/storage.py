"""A JSON header and tensors ↔ one safetensors file, written whole or not at all, with a checksum of all of it.

Statistics, checkpoints and predictions are such files. The header stands as text in the file's metadata, under a key
that says which kind it is. Its last entry, `checksum`, is the SHA-256 of all its others and of every tensor; a second
key would do as well, but safetensors writes several in an order that changes from file to file.
"""

import ctypes
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_MOST_SHOWN = 300  # characters of an error
_RANDOM = 8  # characters that `tempfile` puts between prefix and suffix


class FileError(ValueError):
    """A file is not what `write` wrote; the message completes a sentence that ends with the file's name."""


class ForeignError(FileError):
    """A file is sound, and something else."""


def write(path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file of a kind, whole or not at all."""
    flat = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(flat, {kind: json.dumps(seal(header, flat))}))


def seal(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns a header with the checksum of itself and of tensors: their names, types, shapes and every bit."""
    sha256 = hashlib.sha256(json.dumps(header).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha256.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        # Straight from memory, since numpy is no dependency.
        sha256.update((ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr()))
    return {**header, "checksum": sha256.hexdigest()}


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor], bool]:
    """Reads a file of a kind: its header, its tensors, and whether it has a checksum, as earlier versions wrote none.

    Raises:
        FileError: It is damaged, or something else.
        OSError: It is missing, or may not be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):  # before it is opened: a pipe would wait for a writer
        raise FileError("a directory" if stat.S_ISDIR(mode) else "which is no regular file")
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if kind in metadata else {}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise FileError(f"which is truncated or not safetensors ({brief(error)})") from error
    if kind not in metadata:
        raise ForeignError("a safetensors file of something else")
    try:
        header = json.loads(metadata[kind])
        checksum = header.pop("checksum", None)
        is_sound = checksum is None or seal(header, tensors)["checksum"] == checksum
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FileError("with a broken header") from error
    if not is_sound:
        raise FileError("whose content is not what its checksum is of: it was damaged or changed")
    return header, tensors, checksum is not None


def brief(error: object) -> str:
    r"""Returns an error's text on one line of moderate length, since damaged files put anything into it.

    Examples:
        >>> brief(ValueError("two\nlines"))
        'two lines'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file so that a reader, or a crash at any moment, meets the old or the new one, never a part.

    A symbolic link is followed. What killed processes left of earlier writes of the same file is removed.

    Raises:
        ValueError: There is something other than a file, such as a directory or a device.
    """
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise ValueError(f"Expected a path to write a file to, got {path}, which is no regular file. Name another.")
    _remove_left_over(target)
    descriptor, temporary = _open_temporary(target)
    try:
        # The lock is held until the file has its name; without locks it has to be closed before, as Windows wants it.
        with os.fdopen(descriptor, "wb", closefd=fcntl is None) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only the owner can read
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        if fcntl is not None:
            os.close(descriptor)


def _open_temporary(target: Path) -> tuple[int, str]:
    """Opens a file beside the target, locked as long as its writer lives."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        if fcntl is None:
            return descriptor, name
        with suppress(OSError):  # a file system without locks: then nobody removes it either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(name):  # nobody took it for left over before it was locked
            return descriptor, name
        os.close(descriptor)


def _remove_left_over(target: Path) -> None:
    """Removes temporary files of the target that no process holds. The system releases locks of those that die."""
    if fcntl is None:
        return
    prefix, suffix = f".{target.name}.", ".tmp"
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        own = path.name.startswith(prefix) and path.name.endswith(suffix)
        if not own or len(path.name) != len(prefix) + _RANDOM + len(suffix):
            continue
        with suppress(OSError):  # locked, or already removed by another process
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
