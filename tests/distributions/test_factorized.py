"""The paper's family: draws against SciPy, fits of parts against the fit of the whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats as sps
from torch import Tensor, nn

import stochbn
from oracles import known
from stochbn.distributions.tuning import Tuning


def test_merged_halves_of_the_data_equal_the_whole(model: nn.Module, batches: list[Tensor]) -> None:
    whole, first, second = (stochbn.fit(model, part, progress=False) for part in (batches, batches[:5], batches[5:]))
    merged = first.merge(second)
    assert merged.num_batches == whole.num_batches == 12
    for name, layer in whole.layers.items():
        torch.testing.assert_close(merged.layers[name].moments.mean, layer.moments.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.layers[name].moments.variance, layer.moments.variance, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:The model has seen")
def test_fits_that_do_not_merge(model: nn.Module, batches: list[Tensor]) -> None:
    stats = stochbn.fit(model, batches, progress=False)
    for other in (
        stochbn.fit(model, batches, batch_size=8, progress=False),
        stochbn.fit(model, batches, layers=["1"], progress=False),
    ):
        with pytest.raises(ValueError, match="two fits of one model with one family and batch size"):
            stats.merge(other)


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


def test_merging_asks_for_the_same_and_for_tuning_anew(model: nn.Module, batches: list[Tensor]) -> None:
    one, two = (stochbn.fit(model, part, progress=False) for part in (batches[:6], batches[6:]))
    assert replace(one, tuning=Tuning(2.0)).merge(two).tuning is None
    with pytest.raises(ValueError, match="two fits of one model"):
        replace(one, conditioned=True).merge(two)
