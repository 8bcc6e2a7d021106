"""`check_model` passes on every network that the tests know, and says what is wrong with its arguments."""

import importlib.util
import shutil
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from oracles import calibrate, small_cnn
from stochbn.experiments.training.networks import lenet5, resnet18, vgg11
from stochbn.testing import CheckError, Report, check_model, suite
from stochbn.testing.checks import CHECKS
from stochbn.testing.fingerprint import Fingerprint
from test_third_party import NETWORKS
from tiny import CIFAR, DROPOUT, PLAIN

SLOW = ("compiled", "exported")
OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small CNN": (small_cnn, (1, 8, 8)),
    "small CNN with dropout": (lambda: small_cnn(dropout=0.3), (1, 8, 8)),
    "LeNet-5": (lenet5, (1, 28, 28)),
    "LeNet-5, tiny": (lambda: lenet5(width=PLAIN.width), (1, 28, 28)),
    "LeNet-5, tiny, with dropout": (lambda: lenet5(width=DROPOUT.width, dropout=DROPOUT.dropout), (1, 28, 28)),
    "VGG-11, narrow": (lambda: vgg11(5, width=CIFAR.width), (3, 32, 32)),
    "ResNet-18, narrow": (lambda: resnet18(5, width=0.05), (3, 32, 32)),
}


# Captures of so many layers take seconds, and so do looks at all of them; shallower networks of the kind are checked.
LONG = {"monai DenseNet121": ("conditioned", "unchanged"), "transformers MobileNetV2": ("conditioned", "unchanged")}


@pytest.mark.filterwarnings("ignore:The model has seen")  # it was calibrated on larger batches
@pytest.mark.parametrize("kind", [*OWN, *NETWORKS])
def test_every_network_passes(kind: str) -> None:
    build, shape = {**OWN, **NETWORKS}[kind]
    batches = [torch.rand(8, *shape) for _ in range(4)]
    model = calibrate(build(), batches)
    skipped = (*SLOW, *LONG.get(kind, ()))
    report = check_model(model, batches[0], batches, batch_size=4, skip=skipped)
    assert list(report) == list(CHECKS)
    assert all(found.startswith("passed") for name, found in report.items() if name not in skipped), report


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch's own, within the compiler
def test_compiled_and_exported_too(model: nn.Module, x: Tensor, batches: list[Tensor]) -> None:
    report = check_model(model, x, batches, family="empirical", layers="last")
    able = {"compiled": bool(shutil.which("g++")), "exported": bool(importlib.util.find_spec("onnxruntime"))}
    for name, found in report.items():
        assert found.startswith("passed" if able.get(name, True) else "skipped"), report


def test_regression_is_exported_with_mean_and_std() -> None:
    pytest.importorskip("onnxruntime")
    vectors = [torch.randn(8, 4) for _ in range(8)]
    model = calibrate(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)), vectors)
    report = check_model(model, vectors[0], vectors, link="identity", skip=["compiled"])
    assert report["exported"].startswith("passed")


@pytest.mark.filterwarnings("ignore:.*cannot be vectorised")  # in bfloat16, vmap lacks a rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, model: nn.Module, batches: list[Tensor]) -> None:
    batches = [batch.to(dtype) for batch in batches]
    report = check_model(model.to(dtype), batches[0], batches, skip=SLOW)
    assert f"{torch.finfo(dtype).eps ** 0.5:.2g} allowed" in report["predict"]
    given = check_model(model, batches[0], batches, tolerance=0.5, skip=[n for n in CHECKS if n != "predict"])
    assert "0.5 allowed" in given["predict"]


def test_what_onnx_runtime_lacks_is_no_failure(model: nn.Module, batches: list[Tensor]) -> None:
    pytest.importorskip("onnxruntime")
    doubles = [batch.double() for batch in batches]
    report = check_model(model.double(), doubles[0], doubles, skip=[n for n in CHECKS if n != "exported"])
    assert report["exported"].startswith("skipped: ONNX Runtime cannot run it: ")


def pick(model: nn.Module, item: dict[str, Tensor]) -> Tensor:
    return model(item["image"])["out"]


class Keyed(nn.Sequential):
    """Returns a mapping, and holds what cannot be copied."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with self.lock:
            return {"out": super().forward(x)}


def test_models_and_loaders_of_other_kinds(model: nn.Module, batches: list[Tensor]) -> None:
    loader = DataLoader([{"image": image, "label": 0} for image in torch.cat(batches)], batch_size=16, shuffle=True)
    example = next(iter(loader))
    report = check_model(Keyed(*model), example, loader, call=pick, link="sigmoid", skip=SLOW)
    assert all(found.startswith("passed") for name, found in report.items() if name not in SLOW), report
    data = TensorDataset(torch.cat(batches), torch.zeros(192))
    check_model(model, batches[0][:1], iter(DataLoader(data, batch_size=64)), batch_size=16, skip=SLOW, progress=True)


@pytest.mark.parametrize("train", [False, True])
def test_the_network_is_left_as_it_was(train: bool, dropout_model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    dropout_model.train(train)
    dropout_model[0].training = not train
    handle = dropout_model[0].register_forward_hook(lambda *_: None)
    before, kept = Fingerprint(dropout_model), [batch.clone() for batch in (x, *batches)]
    check_model(dropout_model, x, batches, skip=SLOW)
    assert before.changes(dropout_model) == []
    assert all(torch.equal(a, b) for a, b in zip((x, *batches), kept, strict=True))
    handle.remove()


def test_a_network_that_others_changed_meanwhile(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    """As by a call that closes over it."""

    def call(_: nn.Module, item: Tensor) -> Tensor:
        model[1].momentum = 0.5
        return _(item)

    with pytest.raises(CheckError, match=r"the network itself was changed, not only a copy of it: '1\.momentum'"):
        check_model(model, x, batches, call=call, skip=SLOW)


def test_bad_arguments_are_errors_and_no_failed_checks(
    model: nn.Module, batches: list[Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"skip= to name checks among 'fit', .*'round trip', got 'speed'"):
        check_model(model, x, batches, skip=["speed"])
    with pytest.raises(ValueError, match="without any BatchNorm layer"):
        check_model(nn.Linear(2, 2), x, batches)
    with pytest.raises(ValueError, match="at least 2 mini-batches"):
        check_model(model, x, batches[:1])
    with pytest.raises(RuntimeError, match="Pass call="):
        check_model(model, torch.rand(3, 5, 8, 8), batches)
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install numpy"):
        check_model(model, x, batches)


def test_the_report_is_a_line_a_check() -> None:
    report = Report({"fit": "passed, bit for bit", "round trip": "failed: all", "threads": "skipped: as asked"})
    assert str(report).splitlines() == [
        "fit         passed, bit for bit",
        "round trip  failed: all",
        "threads     skipped: as asked",
    ]
    assert report.failed == ["round trip"]
