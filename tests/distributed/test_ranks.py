"""What ranks have for each other: `worker_ranks.py` has the checks, which a job of three runs."""

from pathlib import Path

import pytest
from torch import nn

import stochbn
from jobs import list_checks, start

SCRIPT = Path(__file__).with_name("worker_ranks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return start(SCRIPT, 3, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("check", list_checks(SCRIPT))
def test_on_three_ranks(found: dict[str, list[str]], check: str) -> None:
    assert found[check] == [""] * 3


def test_without_a_job() -> None:
    with pytest.raises(
        RuntimeError, match=r"Expected a process group to fit in, got none. Call torch.distributed.init"
    ):
        stochbn.distributed.fit(nn.BatchNorm1d(2), [])
    with pytest.raises(RuntimeError, match=r"group to shard in, got none. Call \S+ first\.$"):  # there is no plain one
        stochbn.distributed.shard([])
