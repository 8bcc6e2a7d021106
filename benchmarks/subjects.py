"""The networks to measure, with plausible statistics: random weights, running averages and fits of random images.

Speed does not depend on the weights, so none is trained.
"""

import importlib
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

import stochbn
from stochbn.experiments.training import networks

BATCH_SIZE = 16  # M, the paper's
NUM_CLASSES = 10
NUM_MINI_BATCHES = 256  # kept of the last layer
DROPOUT = 0.5


@dataclass(frozen=True)
class Kind:
    """What a network is.

    Attributes:
        name: As it is printed.
        shape: Of one input.
        build: Makes it, with random weights.
        build_dropout: Makes its variant with dropout, if there is one.
        batch_size: M of the mini-batches that it is fitted on.
        is_large: Of ImageNet's size: measured for one row and against plain passes alone.
        budget: Seconds that one run may take; a longer one is timed on fewer draws.
    """

    name: str
    shape: tuple[int, int, int]
    build: Callable[[], nn.Module]
    build_dropout: Callable[[], nn.Module] | None = None
    batch_size: int = BATCH_SIZE
    is_large: bool = False
    budget: float = 1.7


def resnet50() -> nn.Module:
    """Builds ResNet-50 for 224 × 224 images with 1,000 classes, as `transformers` has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        transformers = importlib.import_module("transformers")
    model: nn.Module = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    return model


KINDS = {
    "lenet5": Kind(
        "LeNet-5",
        (1, 28, 28),
        lambda: networks.lenet5(NUM_CLASSES),
        lambda: networks.lenet5(NUM_CLASSES, dropout=DROPOUT),
    ),
    "vgg11": Kind(
        "VGG-11",
        (3, 32, 32),
        lambda: networks.vgg11(NUM_CLASSES),
        lambda: networks.vgg11(NUM_CLASSES, dropout=DROPOUT),
    ),
    "resnet18": Kind("ResNet-18", (3, 32, 32), lambda: networks.resnet18(NUM_CLASSES)),
    # Whole runs: how many draws `predict` stacks depends here on how many there are.
    "resnet50": Kind("ResNet-50", (3, 224, 224), resnet50, batch_size=4, is_large=True, budget=20.0),
}


class Subject:
    """One network, ready to be measured. What a contender needs beside it is made when first asked for.

    Args:
        key: Of `KINDS`.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.kind = KINDS[key]
        torch.manual_seed(0)
        self.batches = [self.images(self.kind.batch_size) for _ in range(4)]
        self.model = calibrate(self.kind.build(), self.batches)
        self.stats = stochbn.fit(self.model, self.batches, progress=False)

    def images(self, count: int) -> Tensor:
        """Makes random images as smooth as photographs, so that mini-batches differ: (count, C, H, W)."""
        channels, *size = self.kind.shape
        return F.interpolate(torch.randn(count, channels, 4, 4), size, mode="bilinear", align_corners=False)

    @cached_property
    def last_layer(self) -> stochbn.Distribution:
        """Real mini-batches of the last BatchNorm layer, inputs counted in: what the guide recommends."""
        batches = [self.images(self.kind.batch_size) for _ in range(NUM_MINI_BATCHES)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The loader does not (look|seem)|The model has seen")
            return stochbn.fit(self.model, batches, layers="last", family="empirical", conditioned=True, progress=False)

    @cache  # noqa: B019 - there are four subjects in a run
    def session(self, num_draws: int, *, only_last: bool = False) -> Any:
        """An exported file in ONNX Runtime, with as many threads as torch has; ImportError if that is not installed."""
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        stats = self.last_layer if only_last else self.stats
        with tempfile.TemporaryDirectory() as folder:
            stochbn.export(self.model, stats, self.images(2), f"{folder}/net.onnx", num_samples=num_draws)
            return runtime.InferenceSession(f"{folder}/net.onnx", options)

    @cached_property
    def compiled(self) -> Callable[[Tensor], Any]:
        """The network behind `torch.compile`, for fixed shapes; an error if it does not compile whole."""
        code: Callable[[Tensor], Any] = torch.compile(deepcopy(self.model), dynamic=False, fullgraph=True)
        return code

    @cached_property
    def members(self) -> list[nn.Module]:
        """Six copies: an ensemble's members cost the same whatever their weights."""
        return [deepcopy(self.model) for _ in range(6)]

    @cached_property
    def dropout_model(self) -> nn.Module | None:
        """The variant with dropout, its dropout layers active and nothing else in training mode."""
        if self.kind.build_dropout is None:
            return None
        model = calibrate(self.kind.build_dropout(), self.batches)
        for module in model.modules():
            module.training = isinstance(module, nn.Dropout)
        return model

    @cached_property
    def laplace(self) -> Any:
        """A Kronecker-factored Laplace approximation of the last layer; ImportError if the library does not import."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries that it imports
            library = importlib.import_module("laplace")
            data = torch.cat(self.batches)
            labels = torch.randint(NUM_CLASSES, (len(data),))
            posterior = library.Laplace(
                deepcopy(self.model), "classification", subset_of_weights="last_layer", hessian_structure="kron"
            )
            posterior.fit(DataLoader(TensorDataset(data, labels), batch_size=BATCH_SIZE))
        return posterior


def calibrate(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """Sets running statistics to the averages over the batches, as a trained network's are; returns it in eval mode."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        model.train()
        for batch in batches:
            model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()
