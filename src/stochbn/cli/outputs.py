"""A prediction → a table with a row for each input → a .csv, .npz or .parquet file."""

import csv
import importlib
import importlib.util
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import stochbn
from stochbn.distributions.storage import write_atomically

SUFFIXES = (".csv", ".npz", ".parquet")


def check_out(outs: Path | Sequence[Path], *inputs: Path | str | Iterable[Path] | None) -> None:
    """Refuses files to be written that are read too, or that could not be written in the end. Makes nothing yet."""
    given = [Path(each) for i in inputs if i for each in ([i] if isinstance(i, (Path, str)) else i)]
    outs = [outs] if isinstance(outs, Path) else outs
    for number, out in enumerate(outs):
        if out.resolve() in [path.resolve() for path in given]:
            raise ValueError(f"Expected --out to be a file of its own, got an input: {out}.")
        if out.resolve() in [path.resolve() for path in outs[:number]]:
            raise ValueError(f"Expected another --out for each network, got {out} twice.")
        if out.is_dir():
            raise ValueError(f"Expected --out to be a file, got a folder: {out}.")
        there = next(folder for folder in out.absolute().parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"Expected to write to {out}, got {there}, which takes no files. Name another --out.")


def make_folder(out: Path) -> None:
    """Makes the folder of a file that is about to be written."""
    out.parent.mkdir(parents=True, exist_ok=True)


def check_suffix(out: Path) -> None:
    """Refuses a file of another kind, or of one that needs a package that is missing."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"Expected --out to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {out}.")
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ModuleNotFoundError("Expected pyarrow for .parquet files. Install it with pip install pyarrow.")


def make_columns(prediction: stochbn.Prediction) -> dict[str, Tensor]:
    """Returns what is said of each input, by name."""
    counts = {} if prediction.counts is None else {"draws": prediction.counts}
    if prediction.link == "identity":
        total = {} if prediction.noise is None else {"total_std": prediction.total_std}
        return {"mean": prediction.mean, "std": prediction.std, **total, **counts}
    measures = {name: getattr(prediction, name) for name in ("entropy", "aleatoric", "epistemic")}
    if prediction.link == "sigmoid":
        return {**measures, **counts, "probs": prediction.probs}
    confidence, predicted = prediction.probs.max(1)
    return {"predicted": predicted, "confidence": confidence, **measures, **counts, "probs": prediction.probs}


def write_columns(
    path: Path, columns: dict[str, Tensor], ids: Sequence[str] | None, classes: Sequence[str] | None
) -> None:
    """Writes a file, whole or not at all.

    An .npz file has the arrays as they are, and the names beside them. Elsewhere classes are called by their names, and
    what has a value for each class is a column for each.

    Raises:
        ValueError: There is more to an input than a row can hold, such as a value for each pixel.
    """
    arrays = {name: values.cpu().numpy() for name, values in columns.items()}
    buffer = io.BytesIO()
    if path.suffix == ".npz":
        names = {"ids": ids, "classes": classes}
        arrays |= {name: np.array(values) for name, values in names.items() if values is not None}
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    else:
        flat = _flatten(path, arrays, ids, classes)
        if path.suffix == ".parquet":
            pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
            parquet.write_table(pyarrow.table(flat), buffer)
        else:
            buffer.write(_to_csv(flat).encode())
    make_folder(path)
    write_atomically(path, buffer.getvalue())


def _flatten(
    path: Path, arrays: dict[str, Any], ids: Sequence[str] | None, classes: Sequence[str] | None
) -> dict[str, Any]:
    flat: dict[str, Any] = {"index": np.arange(len(next(iter(arrays.values()))))}
    flat |= {} if ids is None else {"id": list(ids)}
    for name, values in arrays.items():
        if values.ndim > 2:
            raise ValueError(f"Expected --out to end in .npz for {name} of shape {values.shape}, got {path}.")
        if values.ndim == 2:
            ends = classes if classes and len(classes) == values.shape[1] else range(values.shape[1])
            flat |= {f"{name}_{end}": part for end, part in zip(ends, values.T, strict=True)}
        elif classes and "predicted" in arrays and name in ("predicted", "label"):
            flat[name] = [classes[number] for number in values.tolist()]
        else:
            flat[name] = values
    return flat


def _to_csv(flat: dict[str, Any]) -> str:
    lists = (values if isinstance(values, list) else values.tolist() for values in flat.values())
    columns = [[f"{v:.9g}" if isinstance(v, float) else v for v in values] for values in lists]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(flat)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()
