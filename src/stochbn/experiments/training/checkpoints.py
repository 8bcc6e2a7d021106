"""Checkpoints: one safetensors file a run, `checkpoints/<recipe>/seed<k>.safetensors` in the cache.

It holds the weights, and while training goes on also the optimiser's tensors and torch's random state. The recipe,
the seed and the history are JSON in the file's own header, so they cannot disagree with the weights. The file is
replaced atomically and carries a checksum; nothing in it is pickled.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from stochbn.distributions import storage
from stochbn.experiments.data.sources import cache_dir, writable
from stochbn.experiments.schema import Index, check
from stochbn.experiments.training.recipes import Recipe

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = "stochbn-checkpoint-1"
_PATIENCE = 1.0  # seconds to try for a lock: somebody may only be looking whether it is held


class _Header(TypedDict):
    format: Literal["stochbn-checkpoint-1"]
    recipe: Recipe
    seed: Index
    history: list[dict[str, float]]
    sha256: str  # of the tensors; earlier versions wrote no other checksum


class CheckpointError(Exception):
    """A checkpoint cannot be read, or belongs to another recipe."""


class LockedError(CheckpointError):
    """Another process is at work on a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    recipe: Recipe  # what it was trained by
    seed: int  # seed of the run
    # One dict an epoch: `train_loss`, `validation_nll`, `validation_error` (a fraction), `seconds`
    history: list[dict[str, float]]
    weights: dict[str, Tensor]  # the network's state dict
    resume: dict[str, Tensor]  # optimiser tensors and random state; empty once the run is finished

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return len(self.history) == self.recipe.epochs


def checkpoint_path(recipe: Recipe, seed: int) -> Path:
    """Returns where a run keeps its checkpoint."""
    return cache_dir() / "checkpoints" / recipe.name / f"seed{seed}.safetensors"


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint of a finished or an interrupted run.

    Raises:
        CheckpointError: The file is missing, damaged, or no checkpoint.
    """
    if not path.exists():
        raise CheckpointError(f"Expected a checkpoint at {path}, got none. Train the network first.")
    try:
        header, tensors, _ = storage.read(path, "checkpoint")
        check(header, _Header, "header")
        if header["sha256"] != digest(tensors):
            raise ValueError("a wrong SHA-256")
        recipe = Recipe(**header["recipe"])
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "resume": {}}
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            groups[group][key] = tensor
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Expected a checkpoint of format {FORMAT}, got a damaged or foreign file: {path} "
            f"({storage.brief(error)}). Delete it to train again."
        ) from error
    return Checkpoint(recipe, header["seed"], header["history"], **groups)


def find_checkpoint(recipe: Recipe, seed: int) -> Checkpoint | None:
    """Reads the checkpoint of a run, finished or not; None if there is none.

    Raises:
        CheckpointError: It is damaged, or of another recipe or seed.
    """
    path = checkpoint_path(recipe, seed)
    if not path.exists():
        return None
    checkpoint = read_checkpoint(path)
    found = {"seed": checkpoint.seed, **asdict(checkpoint.recipe)}
    expected = {"seed": seed, **asdict(recipe)}
    difference = [f"{key} {found[key]!r} instead of {expected[key]!r}" for key in found if found[key] != expected[key]]
    if difference:
        raise CheckpointError(
            f"Expected a checkpoint of {recipe.name} as it is now, got {', '.join(difference)}: {path}. "
            "Delete it to train again."
        )
    return checkpoint


def is_trained(recipe: Recipe, seed: int) -> bool:
    """Returns whether a run is finished; raises as `find_checkpoint` does."""
    checkpoint = find_checkpoint(recipe, seed)
    return checkpoint is not None and checkpoint.finished


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint; a crash at any moment leaves the old file or the new one."""
    tensors = {f"weights/{name}": tensor.contiguous() for name, tensor in checkpoint.weights.items()}
    tensors |= {f"resume/{name}": tensor.contiguous() for name, tensor in checkpoint.resume.items()}
    header = {
        "format": FORMAT,
        "recipe": asdict(checkpoint.recipe),
        "seed": checkpoint.seed,
        "epoch": len(checkpoint.history),
        "history": checkpoint.history,
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "sha256": digest(tensors),
    }
    with writable(path.parent):
        storage.write(path, "checkpoint", header, tensors)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Keeps other processes from a checkpoint, by a lock on `<checkpoint>.lock`; the folder must be there.

    The operating system releases the lock of a process that dies, however it dies. Without such locks, as on Windows,
    nothing is kept from anybody. An error calls the checkpoint by `what` it is.

    Raises:
        LockedError: Another process has the lock.
    """
    if fcntl is None:
        yield
        return
    lock = path.with_name(f"{path.name}.lock")
    start = time.monotonic()
    while (descriptor := _lock(lock)) is None:
        if time.monotonic() - start > _PATIENCE:
            raise LockedError(
                f"Expected to be the only process at work on {what}, got another one that holds {lock}. "
                "Wait until it is done, or end it."
            )
        time.sleep(_PATIENCE / 20)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held: whoever opens the old file meanwhile notices below
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Returns whether a process is at work on a checkpoint."""
    lock = path.with_name(f"{path.name}.lock")
    if fcntl is None or not lock.exists():
        return False
    descriptor = _lock(lock)
    if descriptor is not None:  # a killed process has left the file
        lock.unlink(missing_ok=True)
        os.close(descriptor)
    return descriptor is None


def _lock(path: Path) -> int | None:
    """Returns a descriptor that holds the lock, or None if another one does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # not a file that its last holder has removed
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def load_network(path: Path) -> nn.Module:
    """Builds the network of a finished run in `eval()`. Leaves torch's random state as it was.

    Raises:
        CheckpointError: The file is missing or damaged, or its run is not finished.
    """
    checkpoint = read_checkpoint(path)
    if not checkpoint.finished:
        epochs = f"epoch {len(checkpoint.history)} of {checkpoint.recipe.epochs}"
        raise CheckpointError(f"Expected a finished run, got one at {epochs}: {path}. Train it to the end first.")
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):  # first without memory, of which a foreign recipe may ask for any amount
                expected = _describe(checkpoint.recipe.build_network().state_dict())
            if _describe(checkpoint.weights) != expected:
                raise ValueError("other names, types or shapes")
            network = checkpoint.recipe.build_network()
        network.load_state_dict(checkpoint.weights)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"Expected weights of {checkpoint.recipe.name}, got others in {path} ({storage.brief(error)}). "
            "Delete it to train again."
        ) from error
    return network.eval()


def _describe(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def digest(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of named tensors, names included."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(tensors[name].numpy().tobytes())
    return sha256.hexdigest()
