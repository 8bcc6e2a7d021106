"""What tests of graphs share."""

import pytest
import torch
from torch import Tensor

from stochbn.inference.engine import network


@pytest.fixture
def always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every call capture, whatever it is worth."""
    monkeypatch.setattr(network, "WORTH_CAPTURING", -1)


@pytest.fixture
def vectors() -> list[Tensor]:
    return [torch.randn(8, 6) for _ in range(12)]
