"""Batches of named arrays are predicted as `stochbn.predict` does; tests/cli/test_ray.py has clusters do it."""

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn
from stochbn.ray import BatchPredictor

COLUMNS = {"class": "classes", "probabilities": "probs"}
COLUMNS |= {name: name for name in ("confidence", "entropy", "aleatoric", "epistemic")}


@pytest.fixture
def files(model: nn.Module, stats: stochbn.Factorized, tmp_path: Path) -> tuple[Path, Path]:
    torch.save(model.state_dict(), tmp_path / "net.pt")
    stats.save(tmp_path / "net.sbn.safetensors")
    return tmp_path / "net.pt", tmp_path / "net.sbn.safetensors"


def test_predictions_are_the_library_s_and_other_columns_stay(
    files: tuple[Path, Path], model: nn.Module, stats: stochbn.Factorized, x: Tensor
) -> None:
    batch = {"id": np.array(list("abcdefg")), "x": x.double().numpy(), "weight": np.arange(7)}
    for values in batch.values():
        values.flags.writeable = False  # as in shared memory
    for factory in (small_cnn, "oracles:small_cnn"):
        rows = BatchPredictor(factory, *files, num_samples=9, seed=4)(batch)
        prediction = stochbn.Predictor(model, stats, num_samples=9, seed=4)(x)
        assert set(rows) == {"id", "weight", *COLUMNS}
        assert rows["id"] is batch["id"]
        assert rows["weight"] is batch["weight"]
        for column, name in COLUMNS.items():
            assert torch.equal(torch.from_numpy(rows[column]), getattr(prediction, name))
    expected = stochbn.predict(model, stats, x, num_samples=9, seed=4).probs
    np.testing.assert_allclose(rows["probabilities"], expected.numpy(), rtol=1e-6)


def test_batches_change_nothing(files: tuple[Path, Path], x: Tensor) -> None:
    predictor = BatchPredictor(small_cnn, *files, column="image", num_samples=5)
    whole = predictor({"image": x.numpy()})
    parts = [predictor({"image": part.numpy()}) for part in x.split(3)]
    for name in COLUMNS:
        np.testing.assert_allclose(np.concatenate([part[name] for part in parts]), whole[name], rtol=1e-6, atol=1e-6)


def nest(rows: np.ndarray) -> np.ndarray:
    nested = np.empty(len(rows), object)
    nested[:] = [row.tolist() if row.ndim == 1 else nest(row) for row in rows]
    return nested


def test_rows_may_be_lists_within_lists(files: tuple[Path, Path], x: Tensor) -> None:
    predictor = BatchPredictor(small_cnn, *files, num_samples=5)
    expected = predictor({"x": x.numpy()})
    found = predictor({"x": nest(x.double().numpy())})
    np.testing.assert_array_equal(found["probabilities"], expected["probabilities"])


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_other_links(files: tuple[Path, Path], model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    loader = [(batch, model(batch).detach() + 1) for batch in batches]
    options = {"link": "identity", "num_samples": 5}
    rows = BatchPredictor(small_cnn, *files, **options)({"x": x.numpy()})
    assert list(rows) == ["mean", "std"]
    tuned = stochbn.tune(model, stochbn.load(files[1]), loader, link="identity", num_samples=2, progress=False)
    tuned.save(files[1])
    rows = BatchPredictor(small_cnn, *files, **options)({"x": x.numpy()})
    prediction = stochbn.Predictor(model, tuned, **options)(x)
    for name in ("mean", "std", "total_std"):
        assert torch.equal(torch.from_numpy(rows[name]), getattr(prediction, name))
    rows = BatchPredictor(small_cnn, files[0], link="sigmoid")({"x": x.numpy()})
    assert rows["class"].shape == rows["entropy"].shape == rows["probabilities"].shape == (7, 3)


def test_several_checkpoints_are_an_ensemble(
    files: tuple[Path, Path], model: nn.Module, batches: list[Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = calibrate(small_cnn(), batches)
    torch.save(other.state_dict(), files[0].with_name("other.pt"))
    monkeypatch.setattr("oracles.one", small_cnn(), raising=False)  # a network in place of what builds one
    rows = BatchPredictor("oracles:one", [files[0], files[0].with_name("other.pt")])({"x": x.numpy()})
    expected = stochbn.Predictor([model, other], None)(x)
    assert torch.equal(torch.from_numpy(rows["probabilities"]), expected.probs)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": np.zeros((2, 1, 8, 8))}, r"Expected a column 'x' of inputs, got 'image'\. Name it with column="),
        ({"x": np.zeros((2, 1, 8, 8)), "class": np.zeros(2)}, "no columns with names of predictions, got 'class'"),
        ({"x": np.array(["a", "b"])}, r"Expected inputs of numbers, .* in column 'x', got values of type <U1\."),
        ({"x": np.array([None, None])}, "of numbers, all of one shape, in column 'x', got some that do not stack"),
    ],
)
def test_batches_that_cannot_be_predicted(files: tuple[Path, Path], batch: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchPredictor(small_cnn, *files)(batch)


def test_rows_of_several_shapes(files: tuple[Path, Path]) -> None:
    rows = np.empty(2, object)
    rows[:] = [np.zeros((1, 8, 8)), np.zeros((1, 8, 9))]
    with pytest.raises(ValueError, match=r"all of one shape, in column 'x', got some that do not stack \(all input"):
        BatchPredictor(small_cnn, *files)({"x": rows})


def test_files_that_are_wrong(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected a checkpoint at .*, got none"):
        BatchPredictor(small_cnn, tmp_path / "missing.pt")
    with pytest.raises(ValueError, match=r"Expected a file written by stats\.save, got"):
        BatchPredictor(small_cnn, files[0], files[0])
    with pytest.raises(TypeError, match=r"Expected .*int.* to be or to return an nn.Module, got int"):
        BatchPredictor(int, *files)


def test_it_can_be_sent(files: tuple[Path, Path], x: Tensor) -> None:
    predictor = BatchPredictor(partial(small_cnn, 0.0), str(files[0]), str(files[1]), num_samples=3)
    sent = pickle.loads(pickle.dumps(predictor))
    batch = {"x": x.numpy()}
    np.testing.assert_array_equal(sent(batch)["probabilities"], predictor(batch)["probabilities"])


def test_ray_and_pyarrow_cost_nothing_unless_they_are_used() -> None:
    script = "import stochbn, stochbn.ray, stochbn.cli.commands, stochbn.cli.ray, sys\n"
    script += "assert not {'ray', 'pyarrow', 'pandas'} & {name.split('.')[0] for name in sys.modules}\n"
    script += "from stochbn import *; assert 'stochbn.ray' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
