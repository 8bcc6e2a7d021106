import json
from pathlib import Path

import pytest

from stochbn.experiments.data.sources import DataError
from stochbn.experiments.study.results import Choice, Results, Row


def test_results_are_read_as_they_were_written(results: Results, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    results.write(first)
    found = Results.read(first)
    found.write(second)
    assert first.read_bytes() == second.read_bytes()
    assert found == Results.read(second)
    assert type(found.methods["tuned"]) is Row
    assert type(found.methods["tuned"].choices[0]) is Choice
    ours, theirs = (one.methods["sbn"].plain.scores["nll"] for one in (results, found))
    assert theirs.value == pytest.approx(ours.value, rel=1e-5)
    assert found.sizes == results.sizes


def test_other_files_are_refused(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    results.write(path)
    whole = json.loads(path.read_text())
    for content in (None, "", "[1]", "{}", json.dumps({**whole, "methods": {"sbn": {}}})):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataError, match=r"Expected the numbers of a study in .*Run the study again"):
            Results.read(path)
