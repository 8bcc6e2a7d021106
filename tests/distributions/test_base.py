"""Moments against NumPy, draws against SciPy, files against everything that can be wrong with them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import stats as sps
from torch import Tensor, nn

import stochbn
from conftest import calibrate, small_cnn
from stochbn.distributions.base import Layer
from stochbn.distributions.files import read
from stochbn.statistics.moments import Moments

# ---- moments


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=3, max_size=30),
    st.integers(1, 29),
    st.floats(-1e6, 1e6),
)
def test_merged_parts_equal_the_whole(values: list[list[float]], cut: int, offset: float) -> None:
    x = torch.tensor(values, dtype=torch.float64) + offset
    cut = min(cut, len(x) - 1)
    merged = Moments.of(x[:cut]).merge(Moments.of(x[cut:]))
    scale = x.abs().max().item() + 1
    np.testing.assert_allclose(merged.mean, x.numpy().mean(0), rtol=0, atol=1e-13 * scale)
    np.testing.assert_allclose(merged.variance, x.numpy().var(0, ddof=1), rtol=1e-9, atol=1e-13 * scale**2)


def test_weighted_variance_equals_numpys() -> None:
    x, weights = torch.randn(20, dtype=torch.float64), np.linspace(0.1, 2, 20)
    moments = Moments.of(x[:1]).scale(weights[0])
    for value, weight in zip(x[1:], weights[1:], strict=True):
        moments = moments.merge(Moments.of(value[None]).scale(weight))
    assert moments.mean.item() == pytest.approx(np.average(x, weights=weights))
    assert moments.variance.item() == pytest.approx(np.cov(x, aweights=weights).item())


def test_merged_halves_of_the_data_equal_the_whole(model: nn.Module, batches: list[Tensor]) -> None:
    whole, first, second = (stochbn.fit(model, part, progress=False) for part in (batches, batches[:5], batches[5:]))
    merged = first.merge(second)
    assert merged.num_batches == whole.num_batches == 12
    for name, layer in whole.layers.items():
        torch.testing.assert_close(merged.layers[name].moments.mean, layer.moments.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.layers[name].moments.variance, layer.moments.variance, rtol=1e-9, atol=0)


def test_fits_that_do_not_merge(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, progress=False)
    for other in (
        stochbn.fit(model, batches, batch_size=8, progress=False),
        stochbn.fit(model, batches, layers=["1"], progress=False),
    ):
        with pytest.raises(ValueError, match="two fits of one model with one batch size"):
            stats.merge(other)


# ---- draws


def known(mean: float = 2.0, std: float = 0.5, channels: int = 1, eps: float = 1e-5) -> stochbn.Factorized:
    """A distribution with the given moments, of both the mean and the log variance."""
    centre, deviation = (torch.full((2, channels), v, dtype=torch.float64) for v in (mean, 10 * std**2))
    moments = Moments(11.0, 11.0, centre, deviation)
    return stochbn.Factorized({"bn": Layer(eps, moments)}, batch_size=16, num_batches=11)


known_on_cpu = known(channels=3)


def test_draws_are_normal_and_log_normal() -> None:
    draws = known(mean=0.3, std=0.5, eps=1e-3).sample(5000, seed=0)
    mean, variance = draws.buffers["bn.running_mean"][:, 0], draws.buffers["bn.running_var"][:, 0]
    sigma = (variance + 1e-3).sqrt()  # log σ = ½ log(σ² + ε)
    # One test in a thousand would fail by chance with another seed.
    assert sps.kstest(mean, sps.norm(0.3, 0.5).cdf).pvalue > 1e-3
    assert sps.kstest(sigma, sps.lognorm(s=0.25, scale=math.exp(0.15)).cdf).pvalue > 1e-3
    assert sps.kstest(mean, sps.norm(0.3, 0.6).cdf).pvalue < 1e-3  # the test could have failed
    assert abs(sps.pearsonr(mean, variance).statistic) < 4 / math.sqrt(5000)  # r(μ) r(σ): independent


def test_fitted_families_describe_the_draws() -> None:
    layer = known(mean=0.3, std=0.5, eps=1e-3).layers["bn"]
    assert (layer.r_mu.loc.item(), layer.r_mu.scale.item()) == pytest.approx((0.3, 0.5))
    assert (layer.r_sigma.loc.item(), layer.r_sigma.scale.item()) == pytest.approx((0.15, 0.25))
    assert layer.num_features == 1


def test_channels_and_pairs_of_draws_are_independent() -> None:
    values = known(channels=200).sample(400, seed=1)[::2].buffers["bn.running_mean"].numpy()
    correlations = np.concatenate([np.corrcoef(m)[np.triu_indices(200, 1)] for m in (values, values.T)])
    assert abs(correlations.mean()) < 5 / math.sqrt(200 * len(correlations))
    assert abs(correlations).max() < 6 / math.sqrt(200)  # two equal rows would correlate by 1


def test_two_draws_of_a_pair_mirror_each_other_about_the_centre() -> None:
    stats = known(mean=0.3, std=0.5, eps=1e-3, channels=5)
    draws = stats.sample(10, seed=0)
    centre = stats.sample(1, spread=0, seed=0)
    means = draws.buffers["bn.running_mean"]
    torch.testing.assert_close((means[::2] + means[1::2]) / 2, centre.buffers["bn.running_mean"].expand(5, -1))
    logs = (draws.buffers["bn.running_var"] + 1e-3).log()
    torch.testing.assert_close((logs[::2] + logs[1::2]) / 2, torch.full_like(logs[::2], 0.3))
    assert (means[::2] - means[1::2]).abs().min() > 0


def test_draw_i_does_not_depend_on_how_many_are_drawn() -> None:
    stats = known(channels=13)
    many = stats.sample(20, seed=3)
    for count in (1, 2, 7, 19):
        few = stats.sample(count, seed=3)
        for name, values in few.buffers.items():
            assert torch.equal(values, many.buffers[name][:count])
    assert not torch.equal(stats.sample(1, seed=4).buffers["bn.running_mean"], many.buffers["bn.running_mean"][:1])


def test_seeds_of_any_integer_type() -> None:
    stats = known(channels=3)
    of_numpy, of_python = (stats.sample(2, seed=seed).buffers["bn.running_mean"] for seed in (np.int64(5), 5))
    assert torch.equal(of_numpy, of_python)


def test_draws_in_parts_are_the_same() -> None:
    stats = known(channels=13)
    whole, part = stats.sample(20, seed=3), stats.sample(5, seed=3, first=7)
    assert torch.equal(part.buffers["bn.running_var"], whole.buffers["bn.running_var"][7:12])


def test_default_device_does_not_matter() -> None:
    reference = known(channels=3).sample(2, seed=0).buffers["bn.running_mean"]
    with torch.device("meta"):
        assert torch.equal(known_on_cpu.sample(2, seed=0).buffers["bn.running_mean"], reference)
        assert known_on_cpu.sample(2).buffers["bn.running_mean"].device.type == "cpu"


def test_no_seed_follows_torchs_generator() -> None:
    stats = known(channels=3)
    torch.manual_seed(5)
    a, b = (stats.sample(2).buffers["bn.running_mean"] for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(stats.sample(2).buffers["bn.running_mean"], a)
    assert not torch.equal(a, b)


def test_spread_scales_the_deviation_from_the_centre() -> None:
    stats = known(mean=0.3, std=0.5)
    one, two, none = (stats.sample(100, spread=s, seed=0).buffers for s in (1.0, 2.0, 0.0))
    torch.testing.assert_close(two["bn.running_mean"] - 0.3, 2 * (one["bn.running_mean"] - 0.3))
    log = {key: (b["bn.running_var"] + 1e-5).log() for key, b in (("one", one), ("two", two))}
    torch.testing.assert_close(log["two"] - 0.3, 2 * (log["one"] - 0.3))
    assert torch.all(none["bn.running_mean"] == 0.3)


def test_variance_never_below_zero() -> None:
    draws = known(mean=math.log(1e-3), std=3.0, eps=1e-3).sample(100, seed=0)
    assert draws.buffers["bn.running_var"].min() == 0


def test_slices_of_draws(stats: stochbn.Factorized) -> None:
    draws = stats.sample(10, seed=0)
    assert len(draws[2:5]) == 3
    assert draws[2:5].excluded == draws.excluded
    assert torch.equal(draws[4]["1.running_mean"], draws[2:5][2]["1.running_mean"])


@pytest.mark.parametrize("spread", [-1, math.nan, math.inf])
def test_bad_spread(spread: float) -> None:
    with pytest.raises(ValueError, match="finite spread of at least 0"):
        known().sample(2, spread=spread)


def test_bad_number_of_draws() -> None:
    with pytest.raises(ValueError, match="num_samples of at least 1, got 0"):
        known().sample(0)
    with pytest.raises(ValueError, match=r"one \(S, C\) tensor a buffer"):
        stochbn.Draws({"a": torch.ones(2, 3), "b": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"one \(S, C\) tensor a buffer"):
        stochbn.Draws({})


# ---- drift


def test_drift_is_small_on_the_training_data_and_names_the_layer_elsewhere(
    model: nn.Module, batches: list[Tensor], recwarn: pytest.WarningsRecorder
) -> None:
    drift = stochbn.fit(model, batches, progress=False).drift(model)
    assert list(drift) == ["1", "4", "7"]
    assert all(shift < 0.1 and ratio < 0.3 for shift, ratio in drift.values())
    assert not recwarn
    with pytest.warns(UserWarning, match=r"does not look like the training data: in layer '1'.*preprocessing"):
        stats = stochbn.fit(model, [255 * batch for batch in batches], progress=False)
    assert stats.drift(model)["1"][1] == pytest.approx(math.log(255**2), rel=0.05)


@pytest.mark.parametrize("size", [2, 16])
def test_no_drift_on_training_data_however_wide_its_statistics(size: int, recwarn: pytest.WarningsRecorder) -> None:
    sparse = [torch.randn(size, 50) * (torch.rand(size, 50) < (0.02 if size == 16 else 1)) for _ in range(400)]
    stochbn.fit(calibrate(nn.BatchNorm1d(50), sparse), sparse, progress=False)
    assert not recwarn


def test_drift_of_compiled_and_of_other_models(model: nn.Module, stats: stochbn.Factorized) -> None:
    assert stats.drift(torch.compile(model, backend="eager")) == stats.drift(model)
    with pytest.raises(ValueError, match="another model's"):
        stats.drift(nn.Sequential(nn.BatchNorm1d(4)))


def test_shifted_data_drift_too(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.warns(UserWarning, match="standard deviations from the model's running mean"):
        stochbn.fit(model, [batch + 2 for batch in batches], progress=False)


# ---- another model's statistics


def test_distribution_of_another_model(stats: stochbn.Factorized) -> None:
    draws = stats.sample(2, seed=0)
    wider = small_cnn()
    wider[7] = nn.BatchNorm1d(12)
    with pytest.raises(ValueError, match=r"of another size: '7.running_mean \(10 channels, the model has 12\)'"):
        draws.match(wider)
    with pytest.raises(ValueError, match=r"missing: '0.running_mean'.*unexpected: '1.running_mean'"):
        draws.match(nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"this Sequential, got another model's \(missing: '12.running_mean'"):
        draws.match(nn.Sequential(*small_cnn(), nn.Identity(), nn.Identity(), nn.BatchNorm1d(3)))


def test_other_eps_and_long_lists(stats: stochbn.Factorized) -> None:
    other = small_cnn()
    other[4].eps = 1e-3
    with pytest.raises(ValueError, match="of another ε: '4'"):
        stats.sample(1, seed=0).match(other)
    deep = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(60)])
    with pytest.raises(ValueError, match="and 108 more") as caught:
        stats.sample(1, seed=0).match(deep)
    assert len(str(caught.value)) < 700


def test_excluded_layers_are_not_missed(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(model, batches, layers=["7"], progress=False)
    assert stats.excluded == ("1", "4")
    assert list(stats.sample(2, seed=0).match(model).buffers) == ["7.running_mean", "7.running_var"]
    assert stochbn.predict(model, stats, x).std.max() > 0


def test_draws_take_on_precision(stats: stochbn.Factorized) -> None:
    matched = stats.sample(2, seed=0).match(small_cnn().to(torch.bfloat16))
    assert {values.dtype for values in matched.buffers.values()} == {torch.bfloat16}


# ---- files


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
    assert header["format_version"] == 2
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
    header, tensors = read(file, "cpu")
    change(header, tensors)  # type: ignore[operator]
    save_file(tensors, file, metadata={"stochbn": json.dumps(header)})


HOSTILE = {
    "newer": (lambda h, t: h.update(format_version=3), r"format 2, got .* of format 3. Upgrade stochbn"),
    "no-version": (lambda h, t: h.pop("format_version"), "broken header"),
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
    "huge-weight": (lambda h, t: h["layers"][0].update(weight=10**400), "sound stochbn file"),
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


def test_header_that_claims_more_than_the_file_holds(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[:8] = (2**62).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(ValueError, match="truncated or not safetensors"):
        stochbn.load(file)


FRESH = """
import sys, torch, stochbn
sys.path.insert(0, sys.argv[2])
from conftest import small_cnn
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
