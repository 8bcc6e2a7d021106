"""Result files: what `evaluate` and `study` write and all that `report` reads. Safetensors with a JSON header.

The header says what a file was made of (its identity: if that has changed, the file is made again) and by what (its
provenance). In a prediction file each method has the log-probabilities and the draws' mean entropy on test,
out-of-domain and validation images, under its key in `methods`: `sbn/test/log_probs`, `last@0.50/validation/…`.

Log-probabilities are kept in float16. Near certainty, where a probability in float16 would be off by 1e-4, its
logarithm is near 0 and keeps three digits, so a mean NLL is good to 0.05 %. The draws' mean entropy is in float32: it
is often below what float16 can hold, and mutual information is what it leaves of the total.
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stochbn
from stochbn import Prediction
from stochbn.distributions import storage
from stochbn.experiments.contents import check_contents
from stochbn.experiments.data.sources import DataError, writable
from stochbn.experiments.data.splits import Part

# Of what a prediction file holds and how it was computed. `evaluate` makes files of another format again; `report`
# still reads format 2, which lacks the validation images, the training loss and the records of each method.
FORMAT = 3
PARTS: tuple[Part, ...] = ("test", "out-of-domain")  # what is reported
PREDICTED: tuple[Part, ...] = (*PARTS, "validation")  # what is predicted, so that choices are made from files alone
DRAW_SEED = 0  # of every draw and of every random choice of inputs


@dataclass(frozen=True, eq=False)
class File:
    """A header of plain JSON values, and tensors by name."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path | None = None  # where it was read

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        with writable(path.parent):
            storage.write(path, "stochbn", self.header, self.tensors)

    @staticmethod
    def read(path: Path) -> "File":
        """Reads what `write` wrote, and checks all that predictions and diagnostics have to hold.

        Raises:
            DataError: The file is missing, damaged or something else.
        """
        try:
            header, tensors, _ = storage.read(path, "stochbn")  # files of earlier versions have no checksum
            check_contents(header, tensors)
        except (OSError, ValueError) as error:
            raise DataError(
                f"Expected a file that `stochbn evaluate` wrote, got {path} ({storage.brief(error)}). Evaluate again."
            ) from error
        return File(header, tensors, path)


def is_current(path: Path, identity: Mapping[str, Any]) -> bool:
    """Returns whether a file is there and was made of the same."""
    try:
        header = File.read(path).header
    except DataError:
        return False
    # Through JSON, as the header went: there a tuple is a list.
    return all(header.get(key) == json.loads(json.dumps(value)) for key, value in identity.items())


def provenance(command: str) -> dict[str, Any]:
    """Returns by what a number was made: the command, the commit, versions, the seed of the draws."""
    return {
        "command": command,
        "commit": commit(Path(__file__)),
        "versions": {
            "stochbn": stochbn.__version__,
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
        "draw_seed": DRAW_SEED,
    }


def commit(file: Path) -> str:
    """Returns a file's commit, marked if the code has changed since; "unknown" if it has none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # not some repository around an installed package
        return git("rev-parse", "--short=12", "HEAD") + (
            "-changed" if git("status", "--porcelain", ":/src", ":/benchmarks") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pack(prediction: Prediction, method: str, part: str) -> dict[str, Tensor]:
    """Names the tensors that keep a prediction: log-probabilities (N, K) and the draws' mean entropy (N,)."""
    return {
        f"{method}/{part}/log_probs": prediction.probs.clamp_min(1e-30).log().half(),
        f"{method}/{part}/expected_entropy": prediction.aleatoric.float(),
    }


def unpack(file: File, method: str, part: str) -> tuple[Tensor, Tensor]:
    """Returns the probabilities (N, K), normalised, and the draws' mean entropy (N,) in float64."""
    probs = file.tensors[f"{method}/{part}/log_probs"].double().exp()
    return probs / probs.sum(1, keepdim=True), file.tensors[f"{method}/{part}/expected_entropy"].double()


def prediction_path(folder: Path, recipe: str, seed: int) -> Path:
    """Returns where a network's predictions lie in a results folder."""
    return folder / "predictions" / f"{recipe}-seed{seed}.safetensors"


def diagnostics_path(folder: Path) -> Path:
    """Returns where the measurements on one network lie: exact inference, batch statistics, bound, S, M, gallery."""
    return folder / "predictions" / "diagnostics.safetensors"


def average(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Averages members of an ensemble, as `unpack` returns them."""
    return torch.stack([probs for probs, _ in parts]).mean(0), torch.stack([h for _, h in parts]).mean(0)
