"""Arguments that are refused, with what to pass instead."""

import numpy as np
import pytest

from stochbn.statistics.checks import check_whole


def test_whole_numbers() -> None:
    assert check_whole("num_samples", np.int64(3), 1) == 3
    with pytest.raises(TypeError, match=r"num_samples to be a whole number, got 50\.0"):
        check_whole("num_samples", 50.0, 1)
