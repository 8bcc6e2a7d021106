from dataclasses import replace

import pytest
import torch

import stochbn
from stochbn.experiments.data.splits import Split
from stochbn.experiments.evaluation import inference
from stochbn.experiments.evaluation.inference import TrainedNetwork, input_batches, training_batches
from stochbn.experiments.methods import METHODS, Drawing
from stochbn.experiments.training.checkpoints import checkpoint_path, load_network
from tiny import PLAIN


@pytest.fixture
def trained(_cache: None, splits: dict[str, Split]) -> TrainedNetwork:
    return TrainedNetwork(load_network(checkpoint_path(PLAIN, 1)), PLAIN, 1, splits, num_fit_batches=10)


def test_methods_of_several_spreads_share_passes(trained: TrainedNetwork, splits: dict[str, Split]) -> None:
    drawings = [METHODS["last"].at(spread).drawing for spread in (0.5, 1.0, 2.0)]
    together = trained.predict_together(drawings, splits["validation"], num_samples=8)
    for drawing, prediction in zip(drawings, together, strict=True):
        alone = trained.predict(drawing, splits["validation"], num_samples=8)
        assert (prediction.num_samples, alone.num_samples) == (8, 8)
        torch.testing.assert_close(prediction.probs, alone.probs)
        torch.testing.assert_close(prediction.aleatoric, alone.aleatoric)
    assert not torch.allclose(together[0].probs, together[2].probs, atol=1e-3)


def test_each_distribution_is_fitted_once(trained: TrainedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    original = inference.fit
    monkeypatch.setattr(inference, "fit", lambda *a, **o: fits.append(o["layers"]) or original(*a, **o))
    for key in ("plain", "sbn", "sbn", "tuned", "last", "stage"):
        trained.distribution(METHODS[key].drawing)
    wide = trained.distribution(METHODS["last"].at(2.0).drawing)
    assert fits == [None, ["fc.norm"], ("fc.*",)]
    assert wide.tuning == stochbn.Tuning(2.0)
    assert wide.conditioned
    assert wide.num_batches == 10  # of the statistics of real mini-batches
    assert trained.distribution(METHODS["sbn"].drawing).num_batches == 18
    assert trained.distribution(METHODS["tuned"].drawing).tuning is not None
    assert trained.distribution(METHODS["plain"].drawing) is None


def test_how_many_networks_are_drawn(trained: TrainedNetwork) -> None:
    keys = ("plain", "sbn", "last")
    assert [trained.num_draws(METHODS[key].drawing, 50) for key in keys] == [1, 50, 10]
    assert trained.num_draws(METHODS["last"].drawing, 4) == 4
    assert trained.num_draws(Drawing(dropout=True), 50) == 50


@pytest.mark.parametrize("key", ["exact", "channels-apart"])
def test_what_is_no_distribution_of_one_network_is_refused(trained: TrainedNetwork, key: str) -> None:
    with pytest.raises(ValueError, match="Expected a distribution of one network as it was fitted, got Drawing"):
        trained.distribution(METHODS[key].drawing)


def test_batches_hold_every_input_once(splits: dict[str, Split]) -> None:
    inputs = torch.cat(input_batches(splits["test"], size=100))
    assert torch.equal(inputs, splits["test"].images / 255)
    batches = list(training_batches(splits["train"], PLAIN))
    assert [len(batch) for batch in batches] == [512, 512, 176]
    assert not torch.equal(torch.cat(batches), splits["train"].images / 255)  # in a fixed random order
    sums = [
        torch.cat(b).sum((1, 2, 3)).sort().values for b in (batches, list(training_batches(splits["train"], PLAIN)))
    ]
    torch.testing.assert_close(sums[0], (splits["train"].images / 255).sum((1, 2, 3)).sort().values)
    assert torch.equal(sums[0], sums[1])


def test_augmented_images_are_fitted_where_training_augments(splits: dict[str, Split]) -> None:
    plain = next(training_batches(splits["train"], PLAIN))
    torch.manual_seed(0)
    moved = next(training_batches(splits["train"], replace(PLAIN, augment=True)))
    assert moved.shape == plain.shape
    assert not torch.equal(moved, plain)
