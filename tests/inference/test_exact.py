"""Exact inference against a naive loop and a closed form; the bound against its definition."""

import copy
import math

import pytest
import torch
from scipy import stats as sps
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

import stochbn
from oracles import NormAct, calibrate, small_cnn
from stochbn.inference.exact import LowerBound


def naive(model: nn.Module, batches: list[Tensor], x: Tensor) -> Tensor:
    """The oracle: a training-mode pass for each input and mini-batch. (S, N, K)"""
    model = copy.deepcopy(model).eval()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    with torch.no_grad():
        return torch.stack(
            [torch.stack([model(torch.cat([row[None], batch[1:]]))[0].softmax(0) for row in x]) for batch in batches]
        )


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_equals_the_naive_loop(model: nn.Module, batches: list[Tensor], x: Tensor, chunk_size: int | None) -> None:
    pred = stochbn.exact_predict(model, batches, x, num_samples=6, chunk_size=chunk_size)
    torch.testing.assert_close(pred.samples, naive(model, batches[:6], x), rtol=1e-4, atol=1e-6)


def test_loaders_tuples_dicts_and_ghost_batches(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    reference = stochbn.exact_predict(model, batches, x, num_samples=6).samples
    labelled = [(batch, torch.zeros(16)) for batch in batches]
    named = [{"input": batch} for batch in batches]
    nested = [{"image": batch, "id": torch.tensor(1)} for batch in batches]
    call = lambda model, item: model(item["image"])  # noqa: E731
    for loader, inputs, options in (
        (labelled, x, {}),
        (labelled, DataLoader(TensorDataset(x, torch.zeros(7)), batch_size=3), {"progress": True}),
        (named, {"input": x}, {}),
        (nested, {"image": x, "id": torch.tensor(1)}, {"call": call}),
        ([torch.cat(batches)], x, {"batch_size": 16}),
    ):
        samples = stochbn.exact_predict(model, loader, inputs, num_samples=6, **options).samples
        torch.testing.assert_close(samples, reference, rtol=1e-4, atol=1e-6)


def test_shuffling_loader_is_repeatable_by_seed(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=16, shuffle=True)
    a, b, c = (stochbn.exact_predict(model, loader, x, num_samples=3, seed=s).samples for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_activation_in_the_layer_is_kept(batches: list[Tensor], x: Tensor) -> None:
    model = calibrate(nn.Sequential(NormAct(1), nn.Flatten(), nn.Linear(64, 3)), batches)
    pred = stochbn.exact_predict(model, batches, x, num_samples=4)
    torch.testing.assert_close(pred.samples, naive(model, batches[:4], x), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The model has seen")
def test_agrees_with_sbn_where_the_statistics_are_known() -> None:
    """One BatchNorm layer on Gaussian data, inputs at the centre: μ(B) ~ N(0, 1/M), M σ²(B) ~ χ²(M − 1).

    With a large M the input itself hardly moves its batch, and the batch mean and variance of Gaussian data are
    independent, as in r(μ) r(σ): both averages are over the same distribution but for the family of σ.
    """
    size, samples = 64, 4000
    model = calibrate(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)), [torch.randn(size, 1) for _ in range(200)])
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[1].bias.zero_()
    data = torch.randn(samples * size, 1).split(size)
    stats = stochbn.fit(model, data, progress=False)

    # the fitted moments are those of the closed form
    moments = stats.layers["0"].moments
    assert moments.mean[0].item() == pytest.approx(0, abs=4 / math.sqrt(size * samples))
    assert moments.variance[0].item() == pytest.approx(1 / size, rel=4 * math.sqrt(2 / samples))
    log_chi2 = sps.loggamma(c=(size - 1) / 2, loc=math.log(2 / size))  # log of χ²(M − 1) / M
    assert moments.mean[1].item() == pytest.approx(log_chi2.mean(), abs=4 * log_chi2.std() / math.sqrt(samples))
    assert moments.variance[1].item() == pytest.approx(log_chi2.var(), rel=6 * math.sqrt(2 / samples))

    x = torch.tensor([[0.0], [0.3], [-0.3]])
    exact = stochbn.exact_predict(model, data, x, num_samples=samples)
    sbn = stochbn.predict(model, stats, x, num_samples=samples)
    error = (exact.std**2 / samples + sbn.std**2 / samples).sqrt()
    # An input shifts its own batch mean by x/M, which the bias below is: |dp/dμ| ≤ 2·3·¼·2 = 3 for x = 0.3.
    bias = 3 * 0.3 / size
    assert ((exact.probs - sbn.probs).abs() <= 4 * error + bias).all()
    torch.testing.assert_close(exact.std, sbn.std, rtol=0.1, atol=0)
    one = stochbn.predict(model, None, x)
    assert (exact.epistemic > 0.01).all()  # the plain model has none of it
    assert one.epistemic.max() == 0


def test_file_names_and_constants_go_along(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    seen = []

    def call(model: nn.Module, item: dict[str, object]) -> Tensor:
        seen.append((len(item["names"]), item["anchors"].shape))
        return model(item["image"])

    def item(images: Tensor) -> dict[str, object]:
        return {"image": images, "names": ["n"] * len(images), "anchors": torch.ones(10, 4)}

    pred = stochbn.exact_predict(model, [item(b) for b in batches], item(x), num_samples=2, call=call)
    reference = stochbn.exact_predict(model, batches, x, num_samples=2)
    torch.testing.assert_close(pred.samples, reference.samples)
    assert set(seen) == {(7 * 16, (10, 4))}


def test_not_enough_training_data(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    with pytest.raises(ValueError, match="at least num_samples=50 mini-batches of training data, got 12"):
        stochbn.exact_predict(model, batches, x)


def test_inputs_of_another_form(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    for inputs in ({"input": x}, (x, x), x[:, :, :4]):
        with pytest.raises(
            ValueError, match=r"built like the loader's batches, got .* for batches of Tensor\[15, 1, 8, 8\]"
        ):
            stochbn.exact_predict(model, batches, inputs, num_samples=2)
    with pytest.raises(ValueError, match="num_samples of at least 1"):
        stochbn.exact_predict(model, batches, x, num_samples=0)


# ---- the bound


def test_bound_against_its_definition(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    targets = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    bound = stochbn.lower_bound(model, batches, x, targets, num_samples=12)
    likelihood = naive(model, batches, x).double()[:, torch.arange(7), targets]
    torch.testing.assert_close(bound.lower, likelihood.log().mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bound.marginal, likelihood.mean(0).log(), rtol=1e-4, atol=1e-5)
    assert (bound.lower < bound.marginal).all()
    torch.testing.assert_close(bound.gap, bound.marginal - bound.lower)
    assert bound.gap.min() > 0
    assert bound.summary()["gap"][0] == pytest.approx(bound.gap.mean().item())


def test_no_gap_without_randomness() -> None:
    bound = LowerBound(torch.full((10, 4), -0.7, dtype=torch.float64))
    assert bound.gap.max() < 1e-12
    assert bound.summary()["gap"][1] < 1e-12


def test_standard_errors_are_the_spread_of_repeated_estimates() -> None:
    """Log-normal likelihoods, correlated between examples as shared mini-batches make them; both sides are known."""
    scale, samples, repeats = 0.3, 400, 400
    truth = {"lower": -1.0, "marginal": -1.0 + scale**2 / 2, "gap": scale**2 / 2}
    estimates = {name: torch.zeros(repeats, 2) for name in truth}  # of the mean over examples, and of one example
    errors = {name: torch.zeros(repeats, 2) for name in truth}
    for r in range(repeats):
        shared, own = torch.randn(samples, 1).double(), torch.randn(samples, 5).double()
        bound = LowerBound(-1 + scale * (0.8 * shared + 0.6 * own))
        for name in truth:
            mean, error = bound.summary()[name]
            estimates[name][r] = torch.tensor([mean, getattr(bound, name)[0]])
            errors[name][r] = torch.tensor([error, bound.standard_errors[name][0]])
    for name, value in truth.items():
        spread = estimates[name].std(0)
        # The spread of 400 estimates is itself known to 1/√800 = 3.5 %.
        torch.testing.assert_close(errors[name].mean(0), spread, rtol=4 / math.sqrt(2 * repeats), atol=0)
        bias = scale**2 / (2 * samples)  # of the logarithm of an average
        assert ((estimates[name].mean(0) - value).abs() < 4 * spread / math.sqrt(repeats) + bias).all()


def test_likelihoods_too_small_for_probabilities() -> None:
    bound = LowerBound(torch.tensor([[-2000.0], [-2001.0]], dtype=torch.float64))
    assert bound.marginal.item() == pytest.approx(-2000 + math.log((1 + math.exp(-1)) / 2))


def test_segmentation_bound(batches: list[Tensor], x: Tensor) -> None:
    model = calibrate(nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)), batches)
    bound = stochbn.lower_bound(model, batches, x, torch.zeros(7, 8, 8, dtype=torch.long), num_samples=4)
    assert bound.gap.shape == (7, 8, 8)
    assert bound.summary()["lower"][0] <= bound.summary()["marginal"][0]


def test_bad_targets(batches: list[Tensor], x: Tensor) -> None:
    model = calibrate(small_cnn(), batches)
    with pytest.raises(ValueError, match=r"targets of shape \(7,\)"):
        stochbn.lower_bound(model, batches, x, torch.zeros(6, dtype=torch.long), num_samples=2)
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\), got torch.int64 from 5 to 5"):
        stochbn.lower_bound(model, batches, x, torch.full((7,), 5), num_samples=2)
    with pytest.raises(ValueError, match="K ≥ 2 classes"):
        stochbn.lower_bound(nn.Sequential(model, nn.Linear(3, 1)), batches, x, torch.zeros(7).long(), num_samples=2)
    with pytest.raises(ValueError, match="a row of output for each of 112 inputs"):
        stochbn.lower_bound(nn.Sequential(model, nn.Flatten(0)), batches, x, torch.zeros(21).long(), num_samples=2)
    with pytest.raises(ValueError, match="at least 2 for a bound, got 1"):
        stochbn.lower_bound(model, batches, x, torch.zeros(7, dtype=torch.long), num_samples=1)
