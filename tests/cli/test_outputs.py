"""Tables as files: the same rows in each kind, names that are quoted, and kinds that are refused in time."""

import csv

import numpy as np
import pyarrow.parquet
import pytest
import torch

from stochbn.cli import outputs
from stochbn.cli.outputs import check_suffix, write_columns

COLUMNS = {
    "predicted": torch.tensor([0, 1]),
    "entropy": torch.tensor([0.25, 0.5]),
    "probs": torch.tensor([[0.75, 0.25], [0.125, 0.875]]),
    "label": torch.tensor([1, 1]),
}
IDS = ['a,"b".png', "<script>alert(1)</script>\n"]
CLASSES = ["cat, small", "=dog"]


def read(path):
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pydict()
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_say_the_same_in_each_kind(tmp_path, suffix):
    path = tmp_path / f"deep/pred{suffix}"
    write_columns(path, COLUMNS, IDS, CLASSES)
    table = read(path)
    assert list(table) == ["index", "id", "predicted", "entropy", "probs_cat, small", "probs_=dog", "label"]
    assert table["id"] == IDS
    assert table["predicted"] == CLASSES
    assert table["label"] == ["=dog", "=dog"]
    assert [float(value) for value in table["probs_=dog"]] == [0.25, 0.875]
    assert [int(value) for value in table["index"]] == [0, 1]


def test_parquet_keeps_types(tmp_path):
    write_columns(tmp_path / "pred.parquet", COLUMNS, None, None)
    schema = pyarrow.parquet.read_schema(tmp_path / "pred.parquet")
    types = {name: str(schema.field(name).type) for name in schema.names}
    assert types["predicted"] == types["index"] == "int64"
    assert types["probs_0"] == "float"


def test_arrays_keep_their_shape_and_get_names_beside_them(tmp_path):
    write_columns(tmp_path / "pred.npz", COLUMNS, IDS, CLASSES)
    with np.load(tmp_path / "pred.npz") as arrays:
        assert set(arrays) == {*COLUMNS, "ids", "classes"}
        assert arrays["probs"].shape == (2, 2)
        assert arrays["ids"].tolist() == IDS


def test_whole_numbers_stay_whole(tmp_path):
    write_columns(tmp_path / "pred.csv", {"label": torch.tensor([12_345_678_901])}, None, None)
    assert read(tmp_path / "pred.csv")["label"] == ["12345678901"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_pixels_need_arrays(tmp_path, suffix):
    with pytest.raises(ValueError, match=r"Expected --out to end in .npz for entropy of shape \(2, 3, 3\), got"):
        write_columns(tmp_path / f"deep/pred{suffix}", {"entropy": torch.ones(2, 3, 3)}, None, None)
    assert not list(tmp_path.iterdir())


def test_parquet_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"Expected pyarrow for .parquet files. Install it with pip install"):
        check_suffix(tmp_path / "pred.parquet")
    check_suffix(tmp_path / "pred.csv")
