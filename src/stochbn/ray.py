"""Batches of named arrays → their predictions, as engines such as Ray Data and Spark call it on many machines.

Nothing here imports Ray. `stochbn.cli.ray` runs it on a cluster.
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stochbn.cli.loading import load_model
from stochbn.distributions.files import load
from stochbn.distributions.storage import brief
from stochbn.inference.predict import Predictor
from stochbn.inference.prediction import Prediction
from stochbn.statistics.checks import listing

File = str | os.PathLike[str]


class BatchPredictor:
    """A network from files that predicts batches of named NumPy arrays, as Ray Data's `map_batches` wants it.

    An actor builds it once and calls it on batch after batch. The arguments are small, so they are what travels to the
    actors, which read the files themselves. A row's prediction is the same in whichever actor and batch, to rounding.

    Args:
        factory: What builds the network without arguments: a callable, or its name as `package.module:factory`.
        checkpoint: The network's weights: a file with a state dict, or with safetensors. Several are an ensemble.
        stats: What `fit` or `tune` wrote, a file for each checkpoint; None for no SBN.
        column: Which column holds the inputs.
        device: Where the network runs, such as "cuda".
        options: What `Predictor` takes, such as `num_samples`, `seed`, `link` and `call`.

    Examples:
        >>> import stochbn, tempfile, torch
        >>> def build():
        ...     return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> model, loader = build(), [torch.randn(16, 2) for _ in range(20)]
        >>> for x in loader:
        ...     _ = model(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(model.state_dict(), f"{folder}/net.pt")
        ...     stochbn.fit(model, loader, progress=False).save(f"{folder}/net.sbn.safetensors")
        ...     predict = BatchPredictor(build, f"{folder}/net.pt", f"{folder}/net.sbn.safetensors", num_samples=8)
        >>> rows = predict({"id": np.array([7, 9]), "x": np.zeros((2, 2))})
        >>> rows["id"], rows["probabilities"].shape
        (array([7, 9]), (2, 3))
        >>> list(rows)
        ['id', 'class', 'confidence', 'entropy', 'aleatoric', 'epistemic', 'probabilities']
    """

    def __init__(
        self,
        factory: str | Callable[[], nn.Module],
        checkpoint: File | Sequence[File],
        stats: File | Sequence[File] | None = None,
        *,
        column: str = "x",
        device: str = "cpu",
        **options: Any,
    ) -> None:
        # Copied, since a factory may be the name of one object, which the next weights would overwrite.
        models = [copy.deepcopy(load_model(factory, path, device)) for path in _paths(checkpoint)]
        sources = None if stats is None else [load(path) for path in _paths(stats)]
        self.column = column
        self.device = device
        self.dtype = next((p.dtype for p in models[0].parameters() if p.is_floating_point()), torch.float32)
        self.predictor = Predictor(models, sources, **{"keep_samples": False, **options})

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the other columns of a batch, and the predictions in place of the inputs.

        With link "identity" these are `mean` and `std`, and `total_std` if a noise level was tuned.

        Raises:
            ValueError: The column of inputs is missing or no array, or another has the name of a prediction.
        """
        if self.column not in batch:
            raise ValueError(
                f"Expected a column {self.column!r} of inputs, got {listing(batch, most=5)}. Name it with column=."
            )
        inputs = torch.from_numpy(_stack(batch[self.column], self.column))
        inputs = inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)
        kept = {name: values for name, values in batch.items() if name != self.column}
        predicted = to_columns(self.predictor(inputs))
        if taken := kept.keys() & predicted:
            raise ValueError(
                f"Expected no columns with names of predictions, got {listing(sorted(taken), most=5)}. Rename them."
            )
        return kept | predicted


def to_columns(prediction: Prediction) -> dict[str, np.ndarray]:
    """Returns what is said of each input, by the name of its column."""
    if prediction.link == "identity":
        columns = {"mean": prediction.mean, "std": prediction.std}
        columns |= {} if prediction.noise is None else {"total_std": prediction.total_std}
    else:
        columns = {"class": prediction.classes, "confidence": prediction.confidence}
        columns |= {name: getattr(prediction, name) for name in ("entropy", "aleatoric", "epistemic")}
        columns["probabilities"] = prediction.probs
    return {name: values.detach().cpu().numpy() for name, values in columns.items()}


def _stack(values: np.ndarray, column: str) -> np.ndarray:
    """Copies a column of inputs into one array of numbers. Rows may be arrays or lists, nested ones too.

    A copy in any case: engines hand over views of shared memory that nobody may write to, which torch cannot express.

    Examples:
        >>> rows = np.empty(2, object)
        >>> rows[:] = [np.array([1.0, 2.0]), [3.0, 4.0]]
        >>> _stack(rows, "x")
        array([[1., 2.],
               [3., 4.]])
    """
    got = f"values of type {values.dtype}"
    if values.dtype == object:
        try:
            values = np.stack([_stack(np.asarray(row), column) for row in values])
        except (ValueError, TypeError) as error:
            got = f"some that do not stack ({brief(error)})"
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"Expected inputs of numbers, all of one shape, in column {column!r}, got {got}. Convert them first."
        )
    return np.array(values)


def _paths(files: File | Sequence[File]) -> list[Path]:
    return [Path(file) for file in ([files] if isinstance(files, (str, os.PathLike)) else files)]
