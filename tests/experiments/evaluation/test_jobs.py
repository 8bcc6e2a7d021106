import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stochbn.experiments.evaluation.jobs import Job, complete
from stochbn.experiments.files import File


def test_each_file_is_made_once_and_again_when_its_identity_changes(tmp_path: Path) -> None:
    made: list[str] = []

    def job(name: str, number: int) -> Job:
        def make() -> File:
            made.append(f"{name}{number}")
            return File({"kind": "test"}, {"x": torch.tensor(number)})

        return Job(f"Made {name}", tmp_path / f"{name}.safetensors", {"number": number, "sizes": (1, 2)}, make)

    console = Console(file=io.StringIO())
    for _ in range(2):
        complete([job("a", 1), job("b", 1)], command="stochbn try", console=console)
    complete((job(name, number) for name, number in (("a", 1), ("b", 2))), command="stochbn try", console=console)
    assert made == ["a1", "b1", "b2"]
    file = File.read(tmp_path / "b.safetensors")
    assert file.tensors["x"].item() == 2
    assert (file.header["kind"], file.header["number"], file.header["command"]) == ("test", 2, "stochbn try")
    assert console.file.getvalue().splitlines() == ["Made a", "Made b"] * 3


def test_what_was_made_before_a_failure_stays(tmp_path: Path) -> None:
    def fail() -> File:
        raise OSError("No space left on device")

    first = Job("first", tmp_path / "first.safetensors", {}, lambda: File({}, {"x": torch.zeros(1)}))
    with pytest.raises(OSError, match="No space left"):
        complete(
            [first, Job("second", tmp_path / "second.safetensors", {}, fail)],
            command="",
            console=Console(file=io.StringIO()),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["first.safetensors"]
