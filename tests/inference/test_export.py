"""Exported files against `predict`, in runtimes of their own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn

onnxruntime = pytest.importorskip("onnxruntime")

TOLERANCE = 1e-5


def run(path: Path, **inputs: Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {k: v.numpy() for k, v in inputs.items()}), strict=True))


def assert_equals_predict(found: dict[str, np.ndarray], expected: stochbn.Prediction) -> None:
    for name, values in found.items():
        np.testing.assert_allclose(values, getattr(expected, name).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"layers": "last", "family": "empirical", "conditioned": True}])
def test_any_batch_size(model: nn.Module, batches: list[Tensor], tmp_path: Path, options: dict[str, object]) -> None:
    stats = stochbn.fit(model, batches, progress=False, **options)
    stats = replace(stats, tuning=stochbn.Tuning(spread=1.5, temperature=1.2))
    path = tmp_path / "net.onnx"
    inputs = torch.cat(batches)
    assert stochbn.export(model, stats, inputs[:3], path, num_samples=12, seed=3) < TOLERANCE
    for count in (1, 7, 32):
        x = inputs[:count]
        found = run(path, input=x)
        assert list(found) == ["probs", "entropy", "aleatoric", "epistemic"]
        assert_equals_predict(found, stochbn.predict(model, stats, x, num_samples=12, seed=3))
    about = onnxruntime.InferenceSession(str(path)).get_modelmeta().custom_metadata_map
    assert about["num_samples"] == "12"
    assert (about["spread"], about["temperature"]) == ("1.5", "1.2")
    assert about["made_by"].startswith("stochbn ")
    assert list(tmp_path.iterdir()) == [path]  # and nothing that was made on the way


def test_ensembles_with_dropout_and_without_statistics(batches: list[Tensor], tmp_path: Path) -> None:
    models = [calibrate(small_cnn(dropout=0.3), batches) for _ in range(2)]
    stats = [stochbn.fit(models[0], batches, dropout=True, progress=False), None]
    path = tmp_path / "net.onnx"
    stochbn.export(models, stats, batches[0], path, num_samples=6, dropout=True)
    expected = stochbn.predict(models, stats, batches[1], num_samples=6, dropout=True)
    assert_equals_predict(run(path, input=batches[1]), expected)
    stochbn.export(models, None, batches[0], path)  # a plain ensemble
    assert_equals_predict(run(path, input=batches[1]), stochbn.predict(models, None, batches[1]))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return self.norm(image * 2 + text)


def test_named_inputs_and_regression(tmp_path: Path) -> None:
    loader = [{"image": torch.randn(8, 4), "text": torch.randn(8, 4)} for _ in range(6)]
    model = Two()
    for batch in loader * 20:
        model(**batch)
    stats = stochbn.fit(model, loader, progress=False)
    path = tmp_path / "net.onnx"
    stochbn.export(model, stats, loader[0], path, num_samples=5, link="identity")
    found = run(path, **loader[1])
    assert list(found) == ["mean", "std"]
    assert_equals_predict(found, stochbn.predict(model, stats, loader[1], num_samples=5, link="identity"))


@pytest.mark.slow
def test_machine_code(model: nn.Module, stats: stochbn.Factorized, x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    assert stochbn.export(model, stats, x, path, num_samples=6) < TOLERANCE
    found = torch._inductor.aoti_load_package(str(path))(x[:3])
    expected = stochbn.predict(model, stats, x[:3], num_samples=6)
    torch.testing.assert_close(found[0], expected.probs, rtol=0, atol=TOLERANCE)


def test_without_a_compiler_a_program(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stochbn.inference.export.shutil.which", lambda _: None)
    path = tmp_path / "net.pt2"
    stochbn.export(model, stats, x, path, num_samples=6)
    files = {"stochbn.json": ""}
    found = torch.export.load(path, extra_files=files).module()(x[:3])
    torch.testing.assert_close(found[0], stochbn.predict(model, stats, x[:3], num_samples=6).probs, rtol=0, atol=1e-5)
    assert json.loads(files["stochbn.json"])["num_samples"] == "6"


def test_a_runtime_that_knows_neither_torch_nor_this_package(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, tmp_path: Path
) -> None:
    stochbn.export(model, stats, x, tmp_path / "net.onnx", num_samples=6)
    np.save(tmp_path / "x.npy", x.numpy())
    script = (
        "import sys, numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession('net.onnx')\n"
        "probs, entropy, *_ = session.run(None, {'input': np.load('x.npy')})\n"
        "assert 'torch' not in sys.modules and 'stochbn' not in sys.modules\n"
        "np.save('probs.npy', probs)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    expected = stochbn.predict(model, stats, x, num_samples=6).probs
    np.testing.assert_allclose(np.load(tmp_path / "probs.npy"), expected.numpy(), rtol=0, atol=TOLERANCE)


class Branches(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_mistakes_leave_no_file(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(ValueError, match=r"ends in .onnx or .pt2, got .*net.bin"):
        stochbn.export(model, stats, x, tmp_path / "net.bin")
    with pytest.raises(ValueError, match="folder that exists"):
        stochbn.export(model, stats, x, tmp_path / "none" / "net.onnx")
    with pytest.raises(RuntimeError, match=r"batch that Sequential can take, got Tensor\[7, 1, 9, 9\]"):
        stochbn.export(model, stats, torch.rand(7, 1, 9, 9), path)
    with pytest.raises(RuntimeError, match="can take"):
        stochbn.export(model, stats, x.double(), path)
    branches = Branches(*model)
    with (
        pytest.raises(ValueError, match=r"forward pass can be captured, got Branches: .*stochbn.Predictor"),
        pytest.warns(UserWarning, match="cannot be vectorised"),
    ):
        stochbn.export(branches, stats, x, path, num_samples=3)
    with pytest.raises(ValueError, match=r"can be written as .onnx, got Branches: .*stochbn.Predictor") as error:
        stochbn.export(branches, None, x, path)
    assert "\n" not in str(error.value)
    monkeypatch.setattr("stochbn.inference.export.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"Expected onnx for .onnx files. pip install 'stochbn\[export\]'"):
        stochbn.export(model, stats, x, path)
    assert list(tmp_path.iterdir()) == []
