"""Checkpoints: one safetensors file a run, `checkpoints/<recipe>/seed<k>.safetensors` in the cache.

It holds the weights, and while training goes on also the optimiser's tensors and torch's random state. The recipe,
the seed and the history are JSON in the file's own header, so they cannot disagree with the weights. The file is
replaced atomically and carries a SHA-256 of its tensors; nothing in it is pickled.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from stochbn.experiments.data.sources import cache_dir, write_atomically
from stochbn.experiments.training.recipes import Recipe

FORMAT = "stochbn-checkpoint-1"


class CheckpointError(Exception):
    """A checkpoint cannot be read, or belongs to another recipe."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        recipe: What it was trained by.
        seed: Seed of the run.
        history: One dict an epoch: `train_loss`, `validation_nll`, `validation_error` (a fraction), `seconds`.
        weights: The network's state dict.
        resume: Optimiser tensors and random state; empty once the run is finished.
    """

    recipe: Recipe
    seed: int
    history: list[dict[str, float]]
    weights: dict[str, Tensor]
    resume: dict[str, Tensor]

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
        with safetensors.safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format"] != FORMAT or header["sha256"] != digest(tensors):
            raise ValueError("another format or a wrong SHA-256")
        recipe = Recipe(**header["recipe"])
    except (safetensors.SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Expected a checkpoint of format {FORMAT}, got a damaged or foreign file: {path} ({error}). "
            "Delete it to train anew."
        ) from error
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "resume": {}}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        groups[group][key] = tensor
    return Checkpoint(recipe, header["seed"], header["history"], **groups)


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
    write_atomically(path, save(tensors, {"checkpoint": json.dumps(header)}))


def load_network(path: Path) -> nn.Module:
    """Builds the network of a finished run in `eval()`. Leaves torch's random state as it was.

    Raises:
        CheckpointError: The file is missing or damaged, or its run is not finished.
    """
    checkpoint = read_checkpoint(path)
    if not checkpoint.finished:
        epochs = f"epoch {len(checkpoint.history)} of {checkpoint.recipe.epochs}"
        raise CheckpointError(f"Expected a finished run, got one at {epochs}: {path}. Train it to the end first.")
    with torch.random.fork_rng(devices=[]):
        network = checkpoint.recipe.build_network()
    network.load_state_dict(checkpoint.weights)
    return network.eval()


def digest(tensors: dict[str, Tensor]) -> str:
    """Returns the SHA-256 of named tensors, names included."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(tensors[name].numpy().tobytes())
    return sha256.hexdigest()
