"""For each check, something broken that it finds, and no other check does."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stochbn
from oracles import calibrate
from stochbn.distributions import storage
from stochbn.testing import CheckError, check_model
from stochbn.testing import checks as module
from stochbn.testing.checks import CHECKS

SLOW = ("compiled", "exported")
REAL: dict[str, Callable[..., Any]] = {name: getattr(stochbn, name) for name in ("fit", "predict", "export", "load")}


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(8, 4) for _ in range(8)]


@pytest.fixture
def model(batches: list[Tensor]) -> nn.Module:
    return calibrate(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), batches)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 4)


def failing(model: nn.Module, x: Tensor, batches: list[Tensor], *, only: str = "", **options: Any) -> CheckError:
    """Runs the checks that are fast, or a slow one too; returns what they raised."""
    with pytest.raises(CheckError) as raised:
        check_model(model, x, batches, skip=[name for name in SLOW if name != only], **options)
    return raised.value


def assert_only(name: str, error: CheckError, match: str) -> None:
    assert error.report.failed == [name]
    assert list(error.report) == list(CHECKS)
    assert str(error).startswith(f"Expected every check to pass, got {name!r} failed.\n")
    assert match in error.report[name]


def fit_biased(*arguments: Any, **options: Any) -> stochbn.Distribution:
    """Divides by n, not n − 1."""
    stats = REAL["fit"](*arguments, **options)
    layers = {}
    for name, layer in stats.layers.items():
        moments = layer.moments
        factor = (moments.weight - 1) / moments.weight
        layers[name] = replace(layer, moments=replace(moments, deviation=moments.deviation * factor))
    return replace(stats, layers=layers)


def test_fit(model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochbn, "fit", fit_biased)
    assert_only("fit", failing(model, x, batches), "layer '1' differs by")


def test_fit_that_drops_a_mini_batch(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochbn, "fit", lambda model, loader, **options: REAL["fit"](model, loader[1:], **options))
    assert_only("fit", failing(model, x, batches), "7 mini-batches were counted, not 8")


def predict_wrongly(is_wrong: Callable[[Any, dict[str, Any]], bool]) -> Callable[..., stochbn.Prediction]:
    """Returns a `predict` whose second draw is off by a thousandth, in the given cases."""

    def predict(model: nn.Module, stats: Any, inputs: Any, **options: Any) -> stochbn.Prediction:
        found = REAL["predict"](model, stats, inputs, **options)
        if not is_wrong(stats, options):
            return found
        samples = found.samples.clone()
        samples[1] += 1e-3 * samples.abs().max()
        return replace(found, samples=samples)

    return predict


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_predict(
    conditioned: bool,
    chunk_size: int | None,
    model: nn.Module,
    x: Tensor,
    batches: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = predict_wrongly(
        lambda stats, options: (
            (stats.conditioned, options.get("chunk_size")) == (conditioned, chunk_size)
            and options["link"] == "identity"
        )
    )
    monkeypatch.setattr(stochbn, "predict", wrong)
    how = " with chunk_size=1" if chunk_size else ""
    name = "conditioned" if conditioned else "predict"
    assert_only(name, failing(model, x, batches), f"what predict gives{how} differs by 0.00")


def test_predict_with_a_link(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochbn, "predict", predict_wrongly(lambda _, options: options["link"] == "softmax"))
    assert_only("predict", failing(model, x, batches), "with link 'softmax' differs by")


def test_conditioned_follows_what_eq_2_says(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that are not counted in are found, not only wrong numbers."""

    def predict(model: nn.Module, stats: stochbn.Distribution, inputs: Any, **options: Any) -> stochbn.Prediction:
        return REAL["predict"](model, replace(stats, conditioned=False), inputs, **options)

    monkeypatch.setattr(stochbn, "predict", predict)
    assert_only("conditioned", failing(model, x, batches), "what predict gives differs by")


def test_compiled(model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*arguments: Any, compile: bool = False, **options: Any) -> stochbn.Prediction:  # noqa: A002
        wrong = predict_wrongly(lambda *_: compile)
        return wrong(*arguments, **options)

    monkeypatch.setattr(stochbn, "predict", predict)
    monkeypatch.setattr(module, "_has_compiler", lambda: True)
    error = failing(model, x, batches, only="compiled")
    assert_only("compiled", error, "what predict gives with compile=True differs by")


def test_exported(model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(
        stochbn, "export", lambda *arguments, **options: REAL["export"](*arguments, **options | {"num_samples": 2})
    )
    assert_only("exported", failing(model, x, batches, only="exported"), "probs of the file differs by")


class Racy(nn.Sequential):
    """Keeps what it computes where every thread can write."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        Racy.last = super().forward(x)
        time.sleep(2e-3)
        return 1.0 * Racy.last


def test_threads(model: nn.Module, x: Tensor, batches: list[Tensor]) -> None:
    racy = Racy(*model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_THREADS", 1)
        assert "bit for bit" in check_model(racy, x, batches, skip=SLOW)["threads"]
    error = failing(racy, x, batches)
    assert error.report.failed == ["threads"]
    Racy.last = torch.zeros(0)


class Counting(nn.Sequential):
    """Writes into a buffer of its own whenever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


def test_a_model_that_changes_itself(model: nn.Module, x: Tensor, batches: list[Tensor]) -> None:
    counting = Counting(*model).eval()
    counting.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    error = failing(counting, x, batches)
    assert_only("unchanged", error, "the network is changed: 'calls'")
    assert counting.calls == 0, "which was done to a copy"


def predict_in_eval_mode(model: nn.Module, *arguments: Any, **options: Any) -> stochbn.Prediction:
    training = model.training
    model.eval()
    try:
        return REAL["predict"](model, *arguments, **options)
    finally:
        model.train(training)


def predict_in_place(model: nn.Module, stats: Any, inputs: Any, **options: Any) -> stochbn.Prediction:
    kept = model[1].running_mean.clone()
    model[1].running_mean.zero_()
    model[1].running_mean.copy_(kept)
    return REAL["predict"](model, stats, inputs, **options)


def predict_and_forget(*arguments: Any, **options: Any) -> stochbn.Prediction:
    torch.set_grad_enabled(False)
    return REAL["predict"](*arguments, **options)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (predict_in_eval_mode, "during a call the network is changed: 'training'"),
        (predict_in_place, "changed: '1.running_mean'"),
        (predict_and_forget, "gradient mode"),
    ],
)
def test_a_library_that_changes_the_model(
    broken: Callable[..., Any],
    message: str,
    model: nn.Module,
    x: Tensor,
    batches: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stochbn, "predict", broken)
    try:
        assert_only("unchanged", failing(model.train(), x, batches), message)
    finally:
        torch.set_grad_enabled(True)


def load_rounded(path: Path) -> stochbn.Distribution:
    stats = REAL["load"](path)
    layer = stats.layers["1"]
    rounded = replace(layer.moments, mean=layer.moments.mean.float().double())
    return replace(stats, layers={**stats.layers, "1": replace(layer, moments=rounded)})


def test_round_trip(model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochbn, "load", load_rounded)
    assert_only("round trip", failing(model, x, batches), "layers is another")


def test_a_file_that_is_not_written(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "write_atomically", lambda *_: None)
    assert_only("round trip", failing(model, x, batches), "FileNotFoundError")


def test_all_that_fails_is_named(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochbn, "fit", fit_biased)
    monkeypatch.setattr(stochbn, "load", load_rounded)
    error = failing(model, x, batches)
    assert "got 'fit', 'round trip' failed." in str(error)
    assert isinstance(error, AssertionError)


class Functional(nn.Module):
    """Uses its layer's tensors without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return self.head(F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training))


def test_what_cannot_be_checked_is_skipped_with_the_reason(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    functional = calibrate(Functional(), batches)
    report = check_model(functional, x, batches, skip=[*SLOW, "conditioned"])
    assert report["fit"] == "skipped: hooks do not see 'norm', which the forward pass does not call as modules"
    assert report["conditioned"] == "skipped: as asked"
    monkeypatch.setattr(module, "_has_compiler", lambda: False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    report = check_model(model, x, batches)
    assert report["compiled"] == "skipped: there is no C++ compiler"
    assert report["exported"].startswith("skipped: Expected onnx for .onnx files. pip install 'stochbn[export]'")


def test_what_cannot_be_captured_is_neither_compiled_nor_exported(
    model: nn.Module, x: Tensor, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_has_compiler", lambda: True)
    model[0].register_forward_hook(lambda *_: None)
    report = check_model(model, x, batches)
    for name in SLOW:
        assert report[name].startswith("skipped: the forward pass cannot be captured: it has forward hooks")
