"""Fixtures that the tests share."""

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("untimed")
torch.set_num_threads(1)  # the networks are tiny: threads would only wait for each other


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
