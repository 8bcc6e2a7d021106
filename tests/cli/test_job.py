"""Commands with torchrun do what they do without it; one process prints and writes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stochbn

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OWN = ["own_nets:build", "--checkpoint", "model.pt"]
COMMANDS = {
    "fit": ["fit", *OWN, "--data", "data.npz", "--batch-size", "4", "--family", "empirical", "--num-kept", "5"],
    "tune": ["tune", *OWN, "--data", "data.npz", "--stats", "fit.safetensors", "--batch-size", "10"],
    "predict": ["predict", *OWN, "--data", "data.npz", "--stats", "fit.safetensors", "--batch-size", "10"],
    "missing": ["predict", *OWN, "--data", "missing.npz", "--out", "missing.csv"],
    "missing for one": ["fit", *OWN, "--data", "dataRANK.npz", "--batch-size", "4", "--out", "one.safetensors"],
    "unwritable": ["fit", *OWN, "--data", "data.npz", "--batch-size", "4", "--out", "own_nets.py/x.safetensors"],
    "stream": ["predict", *OWN, "--data", "own_nets:stream", "--out", "stream.csv"],
    "export": ["export", *OWN, "--data", "data.npz", "--out", "net.onnx"],
    "train": ["train", "digits", "--epochs", "1", "--batch-size", "32", "--ghost-size", "16"],
}
OUTPUTS = {"fit": "fit.safetensors", "tune": "tuned.safetensors", "predict": "pred.csv"}


def complete(name: str, prefix: str = "") -> list[str]:
    """Returns a command with the file that it writes."""
    return [*COMMANDS[name], *(["--out", prefix + OUTPUTS[name]] if name in OUTPUTS else [])]


@pytest.fixture(scope="module")
def job(write_own, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, str]]]]:
    """The folder of a job of two processes that has run all commands, and what each process found."""
    folder = tmp_path_factory.mktemp("job")
    write_own(folder)
    (folder / "data0.npz").write_bytes((folder / "data.npz").read_bytes())
    (folder / "commands.json").write_text(json.dumps([complete(name) for name in COMMANDS]))
    script = str(Path(__file__).with_name("worker_job.py"))
    environment = os.environ | {"STOCHBN_DATA": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [*TORCHRUN, script, "commands.json"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = {
        name: [json.loads((folder / f"job-{number}-{rank}.json").read_text()) for rank in range(2)]
        for number, name in enumerate(COMMANDS)
    }
    return folder, found


@pytest.mark.parametrize("name", ["fit", "tune", "predict", "train"])
def test_the_first_process_speaks_for_all(job, name: str) -> None:
    _, found = job
    first, second = found[name]
    assert (first["code"], second["code"]) == (0, 0), first["err"] + second["err"]
    assert "Done in" in first["out"]
    assert second["out"] == second["err"] == ""


@pytest.mark.filterwarnings("ignore")  # of mini-batches that are not those of training
def test_files_are_those_of_one_process(job, run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = job
    monkeypatch.chdir(folder)
    for name in OUTPUTS:
        words = complete(name, prefix="alone-")
        assert run(words[0], factory=words[1], **options(words[2:]))[0] == 0
    fits = [stochbn.load(prefix + "fit.safetensors") for prefix in ("", "alone-")]
    assert torch.equal(fits[0].observations, fits[1].observations)
    torch.testing.assert_close(fits[0].std, fits[1].std, rtol=1e-9, atol=1e-12)
    tunings = [stochbn.load(prefix + "tuned.safetensors").tuning for prefix in ("", "alone-")]
    assert tunings[0].verdict == tunings[1].verdict
    assert [s.nll for s in tunings[0].scores] == pytest.approx([s.nll for s in tunings[1].scores], rel=1e-6)
    rows = [list(csv.reader(Path(prefix + "pred.csv").read_text().splitlines())) for prefix in ("", "alone-")]
    assert rows[0][0] == rows[1][0]
    assert [row[-1] for row in rows[0][1:]] == [row[-1] for row in rows[1][1:]]  # labels, in order
    values = [torch.tensor([[float(value) for value in row] for row in table[1:]]) for table in rows]
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)
    sys.modules.pop("own_nets", None)


def options(words: list[str]) -> dict[str, str]:
    return {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "Expected data at missing.npz, got no such file."),
        ("missing for one", "got an error on rank 1: ValueError: Expected data at data1.npz, got no such file."),
        ("unwritable", "own_nets.py"),
        (
            "stream",
            "Expected a loader with a length, to be cut between processes, got DataLoader of an IterableDataset.",
        ),
        ("export", "Expected one of fit, predict, train, tune with torchrun, got 'export'"),
    ],
)
def test_errors_are_one_line_of_all_processes(job, name: str, message: str) -> None:
    folder, found = job
    assert [result["code"] for result in found[name]] == [2, 2]
    assert found[name][0]["err"].count("\n") == 1
    assert message in found[name][0]["err"]
    assert found[name][1]["err"] == found[name][1]["out"] == ""
    for path in ("missing.csv", "one.safetensors", "stream.csv", "net.onnx"):
        assert not (folder / path).exists()
    assert not list(folder.rglob("*.tmp"))


def test_the_command_itself(own, tmp_path: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [*TORCHRUN, "-m", "stochbn", *complete("fit")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Wrote fit.safetensors") == 1
    assert stochbn.load(tmp_path / "fit.safetensors").num_batches == 16
