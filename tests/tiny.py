"""The tiny experiment that tests of evaluation run, and the data and protocols that make it short."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stochbn.cli import main as cli
from stochbn.experiments.data import splits as data
from stochbn.experiments.data.splits import Split
from stochbn.experiments.evaluation import diagnostics, protocols
from stochbn.experiments.evaluation.protocols import Curve
from stochbn.experiments.training.recipes import RECIPES, Experiment

# Large mini-batches make for few steps and few draws of the last layer, one for each of them.
PLAIN = replace(RECIPES["digits"], name="tiny", epochs=2, width=0.1, batch_size=64, learning_rate=4e-3)
DROPOUT = replace(PLAIN, name="tiny-dropout", dropout=0.2)
TINY = Experiment("tiny", PLAIN, 2, DROPOUT, 1)


CIFAR = replace(RECIPES["vgg11"], name="small", epochs=6, width=0.05)


def measure_little(patch: pytest.MonkeyPatch) -> None:
    counts = {"SAMPLE_COUNTS": (1, 4), "NUM_EXACT": 20, "NUM_BOUND": 10}
    for name, count in counts.items():
        patch.setattr(diagnostics, name, count)
    curve = Curve(batch_sizes=(8, 16), num_samples=2, num_inputs=100)
    patch.setattr(protocols, "SMALL", replace(protocols.SMALL, curve=curve))
    curve = replace(curve, num_fit_inputs=64)
    few = {"num_samples": 4, "num_kept": 8, "num_kept_by_stage": 6, "num_fit_batches": 9, "compiles_ends": False}
    patch.setattr(protocols, "LARGE", replace(protocols.LARGE, curve=curve, **few))


def put_noise_for_cifar(patch: pytest.MonkeyPatch) -> None:
    def load_noise(train: bool, folder: Path | None) -> Split:
        labels = torch.arange(400 if train else 200) % 10
        random = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=random)
        return Split("cifar10", images, labels, tuple("abcdefghij"))

    patch.setitem(data._LOADERS, "cifar10", load_noise)
    patch.setitem(data._NUM_VALIDATION, "cifar10", 100)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code
