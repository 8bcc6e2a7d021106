"""Fixtures that the tests share, and how tests are divided among processes."""

import os
import re
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("untimed")
torch.set_num_threads(1)  # the networks are tiny: threads would only wait for each other

# Here the files of a folder share what takes long to make, so one process runs them all.
TOGETHER = ("tests/experiments/evaluation", "tests/experiments/report", "tests/experiments/study", "tests/play")
# What takes longest comes first: at the end it would keep one process busy while the others are done.
QUEUES = "tests/experiments/evaluation/test_queue.py"  # which share nothing with their folder
FIRST = (
    QUEUES,
    "tests/cli/test_ray.py",
    "tests/experiments/evaluation",
    "tests/inference",
    "tests/experiments",
    "tests/test_docs.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if re.match(r"(tests|src/stochbn)/(experiments|cli|play)/", item.nodeid):
            item.add_marker(pytest.mark.no_cover)  # it counts for the core alone, and tracing slows every call
    items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in FIRST])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divides tests by file and, where files share much, by folder. Marks would say so if they reached xdist 3.8."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = super()._split_scope(nodeid)
            folder = os.path.dirname(name)
            return folder if folder in TOGETHER and name != QUEUES else name

    return ByFileOrFolder(config, log)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.rand(16, 1, 8, 8) for _ in range(12)]


@pytest.fixture
def model(batches: list[Tensor]) -> nn.Module:
    return calibrate(small_cnn(), batches)


@pytest.fixture
def dropout_model(batches: list[Tensor]) -> nn.Module:
    return calibrate(small_cnn(dropout=0.3), batches)


@pytest.fixture
def stats(model: nn.Module, batches: list[Tensor]) -> stochbn.Factorized:
    return stochbn.fit(model, batches, progress=False)


@pytest.fixture
def x() -> Tensor:
    return torch.rand(7, 1, 8, 8)
