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


def test_merged_parts_are_the_whole() -> None:
    rows = torch.randn(12, 2, 3, dtype=torch.float64) + 5
    whole, one, other = collect(rows, 12), collect(rows[:5], 5), collect(rows[5:], 3, 4)
    merged = Collected().merge(one.merge(other)).merge(Collected())  # parts without data change nothing
    assert (merged.num_batches, merged.batch_size) == (12, 16)
    torch.testing.assert_close(merged.moments["bn"].mean, whole.moments["bn"].mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(merged.moments["bn"].variance, whole.moments["bn"].variance, rtol=1e-12, atol=0)


def test_a_layer_that_only_one_part_used() -> None:
    rows = torch.randn(4, 2, 3)
    one, other = collect(rows, 4), collect(rows, 4)
    other.add({"branch": rows}, [1] * 4)
    merged = one.merge(other)
    assert list(merged.moments) == ["bn", "branch"]
    assert merged.moments["branch"].weight == 4


def test_the_mini_batch_with_a_number_that_is_none_is_named() -> None:
    rows = torch.randn(6, 2, 3)
    rows[4, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="in layer 'bn' at mini-batch 4"):
        collect(rows, 3, 3)
