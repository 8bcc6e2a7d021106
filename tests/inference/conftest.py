"""The two paths that predictions take."""

import math

import pytest


@pytest.fixture(params=["captured", "stacked"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has every call take one of the two, whatever it is worth."""
    least = -1 if request.param == "captured" else math.inf
    monkeypatch.setattr("stochbn.inference.engine.network.WORTH_CAPTURING", least)
    return request.param
