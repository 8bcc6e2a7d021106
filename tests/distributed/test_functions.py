"""Two ranks against one process: `worker.py` has the checks, which one job runs one after the other."""

from pathlib import Path

import pytest

from jobs import list_checks, start

SCRIPT = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return start(SCRIPT, 2, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("check", list_checks(SCRIPT))
def test_on_two_ranks(found: dict[str, list[str]], check: str) -> None:
    assert found[check] == [""] * 2
