"""What all families share: seeds, spreads, and drift."""

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, flat, known, naive
from stochbn.distributions.tuning import Tuning

known_on_cpu = known(channels=3)


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


JOINT = ["lowrank", "empirical"]


@pytest.mark.parametrize("family", JOINT)
def test_predict_equals_the_naive_loop(family: str, model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    pred = stochbn.predict(model, stats, x, num_samples=9, seed=4)
    torch.testing.assert_close(pred.samples, naive(model, stats.sample(9, seed=4), x))


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_spread_scales_the_deviations(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    tuned = replace(stats, tuning=Tuning(2.0))
    each = replace(stats, tuning=Tuning({name: 1.0 + i for i, name in enumerate(stats.layers)}))
    one, double = (flat(s.sample(5, seed=0, spread=0.1), s) for s in (stats, tuned))
    centre = stats.centre.numpy()
    np.testing.assert_allclose(double - centre, 2 * (one - centre), atol=1e-9)
    np.testing.assert_allclose(flat(tuned.sample(3, spread=0, seed=0), tuned), np.stack([centre] * 3))
    by_layer = np.repeat([1.0, 2.0, 3.0], stats.sizes)
    np.testing.assert_allclose(
        flat(each.sample(5, seed=0, spread=0.1), each) - centre, by_layer * (one - centre), atol=1e-9
    )


@pytest.mark.parametrize("family", ["factorized", *JOINT])
def test_copies_and_pickles(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    for other in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        ours, theirs = stats.sample(3, seed=1), other.sample(3, seed=1)
        assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in ours.buffers)


@pytest.mark.parametrize("family", JOINT)
def test_draws_in_parts(family: str, model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, family=family, progress=False)
    whole = stats.sample(30, seed=1).buffers["4.running_var"]
    parts = [stats.sample(count, seed=1, first=first).buffers["4.running_var"] for first, count in ((0, 7), (7, 23))]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=0)


def test_a_tuning_that_cannot_be(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, progress=False)
    for spread, temperature in ((-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), ({"1": math.inf}, 1.0)):
        with pytest.raises(ValueError, match="finite spreads of at least 0"):
            Tuning(spread, temperature)
    with pytest.raises(ValueError, match="a spread for each of the layers '1'"):
        replace(stats, tuning=Tuning({"typo": 2.0}))


def test_untuned_takes_the_tuning_back(stats: stochbn.Factorized) -> None:
    tuned = replace(stats, tuning=stochbn.Tuning(spread=2.0, temperature=1.5))
    assert tuned.untuned().tuning is None
    assert tuned.tuning is not None
    for name, values in tuned.untuned().sample(3, seed=0).buffers.items():
        assert torch.equal(values, stats.sample(3, seed=0).buffers[name])
