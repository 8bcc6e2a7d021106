import json
import subprocess
from pathlib import Path

import pytest
import torch
from scipy import stats as scipy_stats

import stochbn
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import File, average, commit, is_current, pack, provenance, unpack

RESULTS = Path(__file__).parents[2] / "results"
LENET5 = RESULTS / "lenet5" / "predictions"


def test_round_trip(tmp_path: Path) -> None:
    file = File(
        {"seed": 3, "classes": ["a", "b"]}, {"x": torch.randn(3, 4).t(), "y": torch.tensor([1], dtype=torch.uint8)}
    )
    file.write(tmp_path / "new" / "file.safetensors")
    again = File.read(tmp_path / "new" / "file.safetensors")
    assert again.header == file.header
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in file.tensors.items())


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    for content in (None, b"", b"not safetensors"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"a file that `stochbn evaluate` wrote, got .*Evaluate again"):
            File.read(path)
        assert not is_current(path, {})


def test_a_file_is_current_if_it_was_made_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    identity = {"format": 3, "draws": {"sbn": 20}, "batch_sizes": (8, 16)}  # a tuple, which JSON has none of
    File({**identity, "commit": "abc"}, {"x": torch.zeros(1)}).write(path)
    assert is_current(path, identity)
    assert not is_current(path, {**identity, "draws": {"sbn": 20, "last": 256}})
    assert not is_current(path, {**identity, "missing": 1})


@pytest.mark.parametrize("scale", [8, 20])
def test_files_keep_likelihoods_and_tiny_uncertainties(scale: int) -> None:
    logits = scale * torch.randn(2000, 10)
    models = [torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False)) for _ in range(3)]
    with torch.no_grad():
        for model in models:
            model[0].weight.copy_(torch.eye(10) + 0.01 * torch.randn(10, 10))
    pred = stochbn.predict(models, None, logits)
    labels = logits.argmax(1)
    probs, expected_entropy = unpack(File({}, pack(pred, "plain", "test")), "plain", "test")
    assert stochbn.nll(probs, labels).item() == pytest.approx(stochbn.nll(pred.probs, labels).item(), rel=2e-3)
    information = (stochbn.entropy(probs) - expected_entropy).clamp_min(0)
    exact = stochbn.mutual_information(pred.samples.double())
    assert scipy_stats.spearmanr(information, exact).statistic > 0.98
    assert (expected_entropy > 0).double().mean() > 0.95


def test_average_of_members() -> None:
    first, second = torch.rand(4, 3), torch.rand(4, 3)
    probs, entropies = average([(first, torch.zeros(4)), (second, torch.ones(4))])
    torch.testing.assert_close(probs, (first + second) / 2)
    assert entropies.tolist() == [0.5] * 4


def test_commit_of_a_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *options, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "code.py"
    file.write_text("1")
    git("init", "-q")
    assert commit(file) == "unknown"
    git("add", ".")
    git("commit", "-qm", "one")
    assert commit(file) == git("rev-parse", "--short=12", "HEAD")
    file.write_text("2")
    assert commit(file).endswith("-changed")


def test_provenance_is_plain_json() -> None:
    made_by = provenance("stochbn evaluate digits")
    assert json.loads(json.dumps(made_by)) == made_by
    assert (made_by["command"], made_by["draw_seed"]) == ("stochbn evaluate digits", 0)


@pytest.mark.skipif(not LENET5.exists(), reason="without the results")
def test_files_of_the_former_format_are_readable() -> None:
    file = File.read(LENET5 / "lenet5-dropout-seed0.safetensors")
    for part in ("test", "out-of-domain"):
        probs, entropies = unpack(file, "dropout+sbn", part)
        torch.testing.assert_close(probs.sum(1), torch.ones(10_000, dtype=torch.float64))
        assert (entropies <= stochbn.entropy(probs) + 0.01).all()
    assert file.tensors["labels"].shape == (10_000,)


@pytest.mark.skipif(not LENET5.exists(), reason="without the results")
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/predictions/*.safetensors")), ids=lambda path: path.stem)
def test_kept_files_are_sound(path: Path) -> None:
    """Those without a checksum too, which earlier versions wrote."""
    assert File.read(path).header["kind"] in ("predictions", "diagnostics")
