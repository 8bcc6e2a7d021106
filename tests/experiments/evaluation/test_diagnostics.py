from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import stochbn
from stochbn.experiments.data.splits import Split
from stochbn.experiments.evaluation import diagnostics
from stochbn.experiments.evaluation.inference import fit
from stochbn.experiments.files import File, average, diagnostics_path, prediction_path, unpack
from stochbn.experiments.training.checkpoints import checkpoint_path, load_network
from stochbn.experiments.training.train import train
from tiny import PLAIN, measure_little


@pytest.mark.usefixtures("_cache")
def test_diagnostics(results: Path, splits: dict[str, Split]) -> None:
    file = File.read(diagnostics_path(results))
    header, tensors = file.header, file.tensors
    assert [row["num_samples"] for row in header["by_samples"]] == [1, 4]
    assert [row["batch_size"] for row in header["by_batch_size"]] == [8, 16]
    for stage in ("before", "after"):
        assert header["bound"][stage]["lower"][0] < header["bound"][stage]["marginal"][0]
    assert header["bound"]["after"]["lower"][0] > header["bound"]["before"]["lower"][0]
    assert (header["bound"]["num_examples"], header["bound"]["num_samples"]) == (10, 6)
    assert unpack(file, "exact", "test")[0].shape == (20, 10)
    assert header["statistics"] == {
        "layers": ["conv1.norm", "conv2.norm", "fc.norm"],
        "num_batches": 18,
        "batch_size": 64,
    }
    images = tensors["gallery/uncertain test/images"]
    assert images.shape == (8, 1, 28, 28)
    member_probs, _ = average([unpack(File.read(prediction_path(results, "tiny", k)), "sbn", "test") for k in (0, 1)])
    entropy = stochbn.entropy(member_probs)
    assert torch.equal(images[0], splits["test"].images[entropy.argmax()])
    assert tensors["gallery/certain test/entropy"].max() <= tensors["gallery/uncertain test/entropy"].min()
    assert header["gallery"]["method"] == "Deep Ensembles (2) + SBN"


@pytest.mark.usefixtures("_cache")
def test_distances_of_appendix_b(results: Path, splits: dict[str, Split]) -> None:
    tensors = File.read(diagnostics_path(results)).tensors
    stats = fit(load_network(checkpoint_path(PLAIN, 0)), splits["train"], PLAIN)
    for layer in ("conv1.norm", "fc.norm"):
        channels = tensors[f"statistics/{layer}/channels"]
        r_mu, r_sigma = stats.layers[layer].r_mu, stats.layers[layer].r_sigma
        torch.testing.assert_close(tensors[f"statistics/{layer}/centre"][0], r_mu.loc[channels], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tensors[f"statistics/{layer}/std"][0], r_mu.scale[channels], rtol=1e-4, atol=1e-7)
        observed = tensors[f"statistics/{layer}/observed"].double().numpy()
        for position, channel in enumerate(channels.tolist()):
            values, ks = observed[:, 0, position], tensors[f"statistics/{layer}/ks"][0, channel].item()
            if np.isfinite(ks):
                family = scipy_stats.norm(r_mu.loc[channel].item(), r_mu.scale[channel].item())
                assert ks == pytest.approx(scipy_stats.kstest(values, family.cdf).statistic, abs=1e-3)
            sigmas, ks = np.exp(observed[:, 1, position] / 2), tensors[f"statistics/{layer}/ks"][1, channel].item()
            log_normal = scipy_stats.lognorm(r_sigma.scale[channel].item(), scale=r_sigma.loc[channel].exp().item())
            if np.isfinite(ks):
                assert ks == pytest.approx(scipy_stats.kstest(sigmas, log_normal.cdf).statistic, abs=1e-3)
        assert tensors[f"statistics/{layer}/ks"].isfinite().all(0).any()


def test_bound_before_training_is_that_of_the_initial_network(
    results: Path, splits: dict[str, Split], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path))
    measure_little(monkeypatch)
    bounds = []
    for seed in (0, 1):  # trained at rate 0, a network stays what it was
        still = load_network(train(replace(PLAIN, name="still", epochs=1, learning_rate=0.0), seed))
        bounds.append(diagnostics._bound(still, PLAIN, splits["train"], num_samples=6, progress=False)["after"])
    before = File.read(diagnostics_path(results)).header["bound"]["before"]
    assert {key: list(value) for key, value in bounds[0].items()} == before
    assert bounds[1] != bounds[0]
