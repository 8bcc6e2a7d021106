import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stochbn
from conftest import calibrate, small_cnn


def test_loader_tuple_dict_and_call_give_the_same(model: nn.Module, batches: list[Tensor]) -> None:
    reference = stochbn.fit(model, batches, progress=False).layers["7"].moments.mean
    labels = torch.zeros(16)
    loader = DataLoader(TensorDataset(torch.cat(batches), torch.zeros(192)), batch_size=16)
    for data, call in (
        ([(x, labels) for x in batches], None),
        ([{"input": x} for x in batches], None),
        ([{"image": x, "id": "a"} for x in batches], lambda model, batch: model(batch["image"])),
        (loader, None),
        (iter(batches), None),
    ):
        stats = stochbn.fit(model, data, call=call, progress=False)
        assert torch.equal(stats.layers["7"].moments.mean, reference)
        assert (stats.batch_size, stats.num_batches) == (16, 12)


def test_items_that_the_default_call_cannot_pass(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(TypeError, match=r"got dict\(image=Tensor\[16, 1, 8, 8\]\).*Pass call="):
        stochbn.fit(model, [{"image": x} for x in batches], progress=False)


def test_incomplete_last_batch_is_dropped(model: nn.Module, batches: list[Tensor]) -> None:
    loader = DataLoader(torch.cat([*batches, torch.full((3, 1, 8, 8), 50.0)]), batch_size=16)
    stats = stochbn.fit(model, loader, progress=False)
    assert stats.num_batches == 12
    assert torch.equal(
        stats.layers["1"].moments.mean, stochbn.fit(model, batches, progress=False).layers["1"].moments.mean
    )


def test_num_batches_limits_the_data(model: nn.Module, batches: list[Tensor]) -> None:
    few = stochbn.fit(model, batches, num_batches=3, progress=False)
    assert few.num_batches == 3
    same = stochbn.fit(model, batches[:3], progress=False)
    assert torch.equal(few.layers["4"].moments.mean, same.layers["4"].moments.mean)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_batches(model: nn.Module, batches: list[Tensor], count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 mini-batches to fit, got {count}"):
        stochbn.fit(model, batches[:count], progress=False)


def test_bad_arguments(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="batch_size of at least 2, got 1"):
        stochbn.fit(model, batches, batch_size=1)
    with pytest.raises(ValueError, match="num_batches of at least 2, got 1"):
        stochbn.fit(model, batches, num_batches=1)
    with pytest.raises(ValueError, match="family 'factorized', got 'flow'"):
        stochbn.fit(model, batches, family="flow")
    with pytest.raises(ValueError, match="with Dropout layers for dropout=True, got Sequential with none"):
        stochbn.fit(model, batches, dropout=True)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(2), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_layer_that_never_runs_is_named_and_left_out() -> None:
    batches = [torch.randn(8, 2) for _ in range(5)]
    model = calibrate(Unused(), batches)
    with pytest.warns(UserWarning, match=r"layers \['unused'\] were used in fewer than 2"):
        stats = stochbn.fit(model, batches, progress=False)
    assert list(stats.layers) == ["used"]
    assert stochbn.predict(model, stats, torch.randn(3, 2)).num_samples == 50
    with pytest.raises(ValueError, match=r"one that uses none of \['unused'\]"):
        stochbn.fit(model, batches, layers=["unused"], progress=False)


def test_compiled_model_is_fitted_and_predicted_by_what_it_wraps(
    model: nn.Module, stats: stochbn.Factorized, batches: list[Tensor], x: Tensor
) -> None:
    compiled = torch.compile(model, backend="eager")
    assert list(stochbn.fit(compiled, batches, progress=False).layers) == ["1", "4", "7"]
    assert torch.equal(stochbn.predict(compiled, stats, x).probs, stochbn.predict(model, stats, x).probs)


def test_gradients_are_off_and_modes_do_not_matter(model: nn.Module, batches: list[Tensor]) -> None:
    recorded = []
    model.register_forward_hook(lambda _, __, output: recorded.append(output.requires_grad))
    a = stochbn.fit(model.eval(), batches, progress=False).layers["7"].moments.mean
    b = stochbn.fit(model.train(), batches, progress=False).layers["7"].moments.mean
    assert torch.equal(a, b)
    assert not any(recorded)


def test_progress_bar(model: nn.Module, batches: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    stochbn.fit(model, batches)
    assert "fit" in capsys.readouterr().err
    stochbn.fit(model, iter(batches), progress=False)
    assert capsys.readouterr().err == ""


# ---- track


def exponential(values: np.ndarray, momentum: float) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: normalised exponential weights, written out."""
    weights = momentum * (1 - momentum) ** np.arange(len(values))[::-1]
    weights /= weights.sum()
    mean = np.tensordot(weights, values, 1)
    return mean, np.tensordot(weights, (values - mean) ** 2, 1) / (1 - (weights**2).sum())


@pytest.mark.parametrize("momentum", [0.1, 0.01, 0.9])
def test_track_is_bias_corrected_exponential_smoothing(momentum: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[np.ndarray] = []
    with stochbn.track(model, momentum) as tracker:
        for step in range(15):
            x = torch.randn(8, 3)
            h = model[0](x).detach().double()
            seen.append(torch.stack([h.mean(0), (h.var(0, correction=0) + 1e-5).log()]).numpy())
            model.train()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            model.eval()
            model(torch.full((8, 3), 100.0))  # validation inside the context does not count
            if step >= 1:
                mean, variance = exponential(np.stack(seen), momentum)
                moments = tracker.distribution().layers["1"].moments
                np.testing.assert_allclose(moments.mean, mean, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(moments.variance, variance, rtol=1e-3, atol=1e-9)
    assert tracker.distribution().batch_size == 8
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model[1]._forward_pre_hooks


def test_tracking_does_not_change_training() -> None:
    def train(tracked: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = small_cnn(dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters())

        def steps() -> None:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.rand(8, 1, 8, 8)).square().mean().backward()
                optimizer.step()

        if tracked:
            with stochbn.track(model):
                steps()
        else:
            steps()
        return model.state_dict()

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


def test_incomplete_batches_and_failed_passes_are_passed_over() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    batches = [torch.randn(8, 2) for _ in range(4)]
    with stochbn.track(model) as whole:
        for batch in batches:
            model(batch)
    with stochbn.track(model) as tracker:
        for batch in batches:
            model(batch)
            model(batch[:3])
            broken = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(8, 2))
            broken.remove()
    a, b = tracker.distribution(), whole.distribution()
    assert a.num_batches == b.num_batches == 4
    assert torch.equal(a.layers["0"].moments.variance, b.layers["0"].moments.variance)


def test_tracked_statistics_predict(batches: list[Tensor], x: Tensor) -> None:
    model = small_cnn()
    with stochbn.track(model) as tracker:
        for batch in batches:
            model(batch)
    pred = stochbn.predict(model, tracker.distribution(), x, num_samples=5)
    assert pred.std.max() > 0


def test_track_that_saw_nothing(model: nn.Module, batches: list[Tensor]) -> None:
    model.eval()
    with stochbn.track(model) as tracker:
        model(batches[0])
    with pytest.raises(ValueError, match="at least 2 training batches inside track, got 0"):
        tracker.distribution()


@pytest.mark.parametrize("momentum", [0, 1, -0.1, math.nan])
def test_bad_momentum(model: nn.Module, momentum: float) -> None:
    with pytest.raises(ValueError, match="momentum between 0 and 1"), stochbn.track(model, momentum):
        pass


def test_track_reports_non_finite_statistics() -> None:
    model = nn.BatchNorm1d(2)
    with stochbn.track(model), pytest.raises(ValueError, match="NaN or Inf in layer ''"):
        model(torch.full((4, 2), math.nan))
