"""Files: round trips, and everything that can be wrong with them."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import stochbn
from oracles import calibrate
from stochbn.distributions import storage
from stochbn.distributions.files import read
from stochbn.distributions.tuning import Score, Tuning


@pytest.fixture
def file(stats: stochbn.Factorized, tmp_path: Path) -> Path:
    path = tmp_path / "net.sbn.safetensors"
    stats.save(path)
    return path


def test_round_trip_is_exact(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    stats = stochbn.fit(model, batches, layers=["1", "7"], progress=False)
    path = tmp_path / "net.sbn.safetensors"
    stats.save(path)
    loaded = stochbn.load(str(path), device="cpu")
    assert (loaded.batch_size, loaded.num_batches, loaded.excluded) == (16, 12, ("4",))
    assert list(loaded.layers) == list(stats.layers)
    a, b = stats.sample(5, seed=0), loaded.sample(5, seed=0)
    assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    assert os.listdir(tmp_path) == [path.name]  # nothing temporary stays
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_header_can_be_read_without_the_library(file: Path) -> None:
    with safe_open(file, "pt") as handle:
        header = json.loads(handle.metadata()["stochbn"])
    assert header["format_version"] == 3
    assert (header["family"], header["batch_size"], header["num_batches"]) == ("factorized", 16, 12)
    assert [(layer["name"], layer["eps"]) for layer in header["layers"]] == [("1", 1e-5), ("4", 1e-5), ("7", 1e-5)]


def test_root_layer_round_trip(tmp_path: Path) -> None:
    batches = [torch.randn(8, 2) for _ in range(4)]
    stats = stochbn.fit(calibrate(nn.BatchNorm1d(2), batches), batches, progress=False)
    stats.save(tmp_path / "root.safetensors")
    assert list(stochbn.load(tmp_path / "root.safetensors").layers) == [""]


def test_failed_save_keeps_the_old_file(stats: stochbn.Factorized, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        stats.save(file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_truncated_file(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"got .*net.sbn.safetensors, which is truncated or not safetensors"):
        stochbn.load(file)


def test_foreign_files(tmp_path: Path, model: nn.Module) -> None:
    pickled = tmp_path / "model.pt"
    torch.save(model.state_dict(), pickled)
    with pytest.raises(ValueError, match="not safetensors"):
        stochbn.load(pickled)
    weights = tmp_path / "model.safetensors"
    save_file(model.state_dict(), weights)
    with pytest.raises(ValueError, match=r"safetensors file of something else.*load_state_dict"):
        stochbn.load(weights)
    with pytest.raises(FileNotFoundError):
        stochbn.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="a directory"):
        stochbn.load(tmp_path)


def rewrite(file: Path, change: object) -> None:
    header, tensors = read(file)
    change(header, tensors)  # type: ignore[operator]
    storage.write(file, "stochbn", header, tensors)  # with a checksum that is right


def tuning(**changed: object) -> dict[str, object]:
    return {"spread": 1.0, "temperature": 1.0, "curve": [], **changed}


HOSTILE = {
    "newer": (lambda h, t: h.update(format_version=4), r"format 3, got .* of format 4. Upgrade stochbn"),
    "no-version": (lambda h, t: h.pop("format_version"), "of format None"),
    "family": (lambda h, t: h.update(family="flow"), "unknown family 'flow'"),
    "no-layers": (lambda h, t: (h.update(layers=[]), t.clear()), "file without layers"),
    "layers-type": (lambda h, t: h.update(layers=3), "sound stochbn file"),
    "no-eps": (lambda h, t: h["layers"][0].pop("eps"), "no 'eps'"),
    "eps-text": (lambda h, t: h["layers"][0].update(eps="1"), "numbers in layer '1'"),
    "eps-negative": (lambda h, t: h["layers"][0].update(eps=-1.0), "numbers in layer '1'"),
    "eps-nan": (lambda h, t: h["layers"][0].update(eps=math.nan), "numbers in layer '1'"),
    "weight": (lambda h, t: h["layers"][0].update(weight=0.5), "weights in layer '1'"),
    "name-type": (lambda h, t: h["layers"][0].update(name=7), "layer name 7"),
    "name-twice": (lambda h, t: h["layers"].append(h["layers"][0]), "layer name '1'"),
    "batch-size": (lambda h, t: h.update(batch_size=True), "batch_size True"),
    "num-batches": (lambda h, t: h.update(num_batches=-3), "num_batches -3"),
    "dropout": (lambda h, t: h.update(dropout="no"), "impossible dropout"),
    "version-type": (lambda h, t: h.update(format_version=True), "of format True"),
    "huge-weight": (lambda h, t: h["layers"][0].update(weight=10**400), "numbers in layer '1'"),
    "huge-batch-size": (lambda h, t: h.update(batch_size=10**400), r"impossible batch_size 10*\.\.\.0*\."),
    "huge-num-batches": (lambda h, t: h.update(num_batches=10**400), "impossible num_batches"),
    "huge-spread": (lambda h, t: h.update(tuning=tuning(spread=10**400)), "impossible tuning"),
    "huge-spread-of-a-layer": (
        lambda h, t: h.update(tuning=tuning(spread={"1": 1, "4": 1, "7": 10**400})),
        "impossible tuning",
    ),
    "huge-temperature": (lambda h, t: h.update(tuning=tuning(temperature=10**400)), "impossible tuning"),
    "tuning-type": (lambda h, t: h.update(tuning=0), "sound stochbn file"),
    "curve-text": (lambda h, t: h.update(tuning=tuning(curve=[["1", "1", "1"]])), "impossible tuning, score"),
    "scalar": (lambda h, t: t.update({"4.mean": torch.tensor(1.0).double()}), "shape of layer '4'"),
    "no-channels": (
        lambda h, t: t.update({f"4.{k}": torch.ones(2, 0).double() for k in ("mean", "deviation")}),
        "shape of layer '4'",
    ),
    "excluded": (lambda h, t: h.update(excluded=[1]), "excluded layers"),
    "missing-tensor": (lambda h, t: t.pop("4.mean"), "no '4.mean'"),
    "extra-tensor": (lambda h, t: t.update(virus=torch.ones(1)), r"tensors \['virus'\]"),
    "shape": (lambda h, t: t.update({"4.mean": torch.ones(6).double()}), "shape of layer '4'"),
    "shapes": (lambda h, t: t.update({"4.mean": torch.ones(2, 5).double()}), "shape of layer '4'"),
    "dtype": (lambda h, t: t.update({"4.mean": torch.ones(2, 6)}), "precision of layer '4'"),
    "nan": (lambda h, t: t["4.mean"].fill_(math.nan), "NaN or Inf in layer '4'"),
    "negative": (lambda h, t: t["4.deviation"].fill_(-1), "variance in layer '4'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(file: Path, case: str) -> None:
    change, message = HOSTILE[case]
    rewrite(file, change)
    with pytest.raises(ValueError, match=message):
        stochbn.load(file)


@pytest.mark.parametrize("header", ["{", "[" * 100_000, "null", '"text"'])
def test_broken_header(file: Path, header: str) -> None:
    save_file({"a": torch.ones(1)}, file, metadata={"stochbn": header})
    with pytest.raises(ValueError, match="broken header"):
        stochbn.load(file)


def test_a_flipped_bit_anywhere_is_noticed_or_does_no_harm(stats: stochbn.Factorized, file: Path) -> None:
    content, draws, num_loaded = file.read_bytes(), stats.sample(2, seed=0).buffers, 0
    for index in range(0, 8 * len(content), 61):  # coprime to 8, so that all bits of a byte have their turn
        flipped = bytearray(content)
        flipped[index // 8] ^= 1 << index % 8
        file.write_bytes(flipped)
        try:
            loaded = stochbn.load(file).sample(2, seed=0).buffers
        except ValueError:
            continue
        num_loaded += 1  # such as 1e-05 as 1E-05
        assert all(torch.equal(loaded[name], values) for name, values in draws.items())
    assert num_loaded <= 2


def test_a_file_of_the_new_format_needs_its_checksum(file: Path) -> None:
    header, tensors = read(file)
    save_file(tensors, file, metadata={"stochbn": json.dumps(header)})
    with pytest.raises(ValueError, match=r"got .* without its checksum\. Save it again\."):
        stochbn.load(file)
    save_file(tensors, file, metadata={"stochbn": json.dumps(header | {"format_version": 2})})  # as 0.1.0 wrote it
    assert stochbn.load(file).batch_size == 16


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", 7.5])
def test_a_device_that_is_none(file: Path, device: object) -> None:
    with pytest.raises(ValueError, match=r"^Expected a device that torch can use, got .*\. Pass 'cpu'\.$") as raised:
        stochbn.load(file, device=device)  # type: ignore[arg-type]
    assert repr(device) in str(raised.value)


def test_tuning_by_hand_has_the_same_limits() -> None:
    with pytest.raises(ValueError, match="Expected finite spreads"):
        Tuning(10**400)
    with pytest.raises(ValueError, match="Expected finite spreads"):
        Tuning(1.0, 10**400)


def test_the_widest_spread_that_loads_can_be_drawn(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    stats = stochbn.fit(model, batches, conditioned=True, progress=False)
    replace(stats, tuning=Tuning(1e200)).save(tmp_path / "s.safetensors")
    assert all(
        (share == 0.5).all() for share in stochbn.load(tmp_path / "s.safetensors").sample(2, seed=0).shares.values()
    )


def test_header_that_claims_more_than_the_file_holds(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[:8] = (2**62).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        stochbn.load(file)


FRESH = """
import sys, torch, stochbn
sys.path.insert(0, sys.argv[2])
from oracles import small_cnn
from safetensors.torch import load_file
model = small_cnn()
model.load_state_dict(load_file(f"{sys.argv[1]}/model.safetensors"))
x = load_file(f"{sys.argv[1]}/x.safetensors")["x"]
pred = stochbn.predict(model, stochbn.load(f"{sys.argv[1]}/stats.safetensors"), x, num_samples=6)
torch.save(pred.samples, f"{sys.argv[1]}/samples.pt")
"""


def test_a_fresh_process_predicts_the_same_bits(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, tmp_path: Path
) -> None:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_file({"x": x}, tmp_path / "x.safetensors")
    stats.save(tmp_path / "stats.safetensors")
    here = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path), here], check=True, timeout=300)
    samples = torch.load(tmp_path / "samples.pt", weights_only=True)
    assert torch.equal(samples, stochbn.predict(model, stats, x, num_samples=6).samples)


JOINT = ["lowrank", "empirical"]


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_files_give_back_everything(family: str, model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    stats = stochbn.fit(model, batches, family=family, conditioned=True, progress=False)
    names = dict.fromkeys(stats.layers, 1.5)
    scores = (
        Score(None, 1.0, 0.3, 0.05, 0.01),
        Score(1.0, 0.9, 0.25, 0.0, 0.0),
        Score(names, 1.0, 0.2, -0.05, 0.02, 0.1),
    )
    tunings = (Tuning(1.25, 0.8, scores, verdict=("It is so.",)), Tuning(names, 1.0), Tuning(2.0, 1.0, scores, 0.5))
    for tuning in (None, *tunings):
        tuned = replace(stats, tuning=tuning)
        tuned.save(tmp_path / "s.safetensors")
        back = stochbn.load(tmp_path / "s.safetensors")
        assert type(back) is type(stats)
        assert back.tuning == tuning
        assert (back.conditioned, back.dropout, back.batch_size) == (True, False, 16)
        ours, theirs = tuned.sample(6, seed=2), back.sample(6, seed=2)
        assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in ours.buffers)
        assert all(torch.equal(ours.shares[name], theirs.shares[name]) for name in stats.layers)
        assert theirs.temperature == (tuning.temperature if tuning else 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "psychic"}, "unknown family"),
        ({"conditioned": 1}, "impossible conditioned"),
        ({"tuning": {"spread": "wide", "temperature": 1.0, "curve": []}}, "impossible tuning"),
        ({"tuning": {"spread": -1.0, "temperature": 1.0, "curve": []}}, "finite spreads of at least 0"),
        ({"tuning": {"spread": {"9": 1.0}, "temperature": 1.0, "curve": []}}, "a spread for each of the layers"),
        ({"tuning": {"spread": 1.0, "temperature": float("inf"), "curve": []}}, "impossible tuning"),
        ({"tuning": {"spread": 1.0}}, "no 'temperature'"),
        ({"tuning": {"spread": None, "temperature": 1.0, "curve": []}}, "impossible tuning"),
        ({"tuning": {"spread": 1.0, "temperature": 1.0, "noise": "some", "curve": []}}, "impossible tuning"),
        (
            {"tuning": {"spread": 1.0, "temperature": 1.0, "scores": [{"spread": 1.0, "nll": "low"}]}},
            "impossible tuning, score",
        ),
    ],
)
def test_damaged_files_are_refused(
    change: dict[str, object], message: str, model: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    stats = stochbn.fit(model, batches, family="empirical", progress=False)
    path = tmp_path / "s.safetensors"
    stats.save(path)
    header, tensors = read(path)
    storage.write(path, "stochbn", header | change, tensors)
    with pytest.raises(ValueError, match=message):
        stochbn.load(path)
    tensors["observations"][0, 0, 0] = math.nan
    storage.write(path, "stochbn", header, tensors)
    with pytest.raises(ValueError, match="NaN or Inf in observations"):
        stochbn.load(path)
