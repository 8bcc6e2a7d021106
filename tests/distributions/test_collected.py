"""What is collected in parts is what is collected at once."""

import pytest
import torch
from torch import Tensor

from stochbn.distributions.collected import Collected


def collect(rows: Tensor, *sizes: int) -> Collected:
    """Shows rows (G, 2, C) of one layer, so many at a time."""
    collected = Collected()
    collected.batch_size = 16
    for part in rows.split(list(sizes)):
        collected.add({"bn": part}, [1] * len(part))
    return collected


def test_how_observations_come_makes_no_difference() -> None:
    rows = torch.randn(12, 2, 3, dtype=torch.float64) + 5
    whole, parts = collect(rows, 12), collect(rows, 1, 4, 7)
    assert whole.num_batches == parts.num_batches == 12
    torch.testing.assert_close(parts.moments["bn"].mean, whole.moments["bn"].mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(parts.moments["bn"].variance, rows.var(0), rtol=1e-12, atol=0)


def test_the_mini_batch_with_a_number_that_is_none_is_named() -> None:
    rows = torch.randn(6, 2, 3)
    rows[4, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="in layer 'bn' at mini-batch 4"):
        collect(rows, 3, 3)
