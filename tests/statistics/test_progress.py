"""Bars that are shown, and bars that are not."""

import pytest

from stochbn.statistics.progress import progress_bar


@pytest.mark.parametrize("shown", [False, True])
def test_bars(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("work", "step", 2, shown=shown) as bar:
        bar.update()
        bar.set_postfix(error=1)
        bar.update(1)
    assert ("work" in capsys.readouterr().err) == shown
