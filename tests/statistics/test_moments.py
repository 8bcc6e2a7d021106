"""Streaming moments against NumPy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stochbn.statistics.moments import Moments


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=3, max_size=30),
    st.integers(1, 29),
    st.floats(-1e6, 1e6),
)
def test_merged_parts_equal_the_whole(values: list[list[float]], cut: int, offset: float) -> None:
    x = torch.tensor(values, dtype=torch.float64) + offset
    cut = min(cut, len(x) - 1)
    merged = Moments.of(x[:cut]).merge(Moments.of(x[cut:]))
    scale = x.abs().max().item() + 1
    np.testing.assert_allclose(merged.mean, x.numpy().mean(0), rtol=0, atol=1e-13 * scale)
    np.testing.assert_allclose(merged.variance, x.numpy().var(0, ddof=1), rtol=1e-9, atol=1e-13 * scale**2)


def test_weighted_variance_equals_numpys() -> None:
    x, weights = torch.randn(20, dtype=torch.float64), np.linspace(0.1, 2, 20)
    moments = Moments.of(x[:1]).scale(weights[0])
    for value, weight in zip(x[1:], weights[1:], strict=True):
        moments = moments.merge(Moments.of(value[None]).scale(weight))
    assert moments.mean.item() == pytest.approx(np.average(x, weights=weights))
    assert moments.variance.item() == pytest.approx(np.cov(x, aweights=weights).item())
