import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import stochbn
from oracles import small_cnn


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


def test_subclass_that_changes_its_input_first() -> None:
    class PreAct(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu())

    model, batches = PreAct(3), [torch.randn(16, 3) for _ in range(5)]
    with stochbn.track(model, 0.5) as tracker:
        for batch in batches:
            model(batch)
    mean, _ = exponential(np.stack([batch.relu().mean(0).numpy() for batch in batches]), 0.5)
    np.testing.assert_allclose(tracker.distribution().layers[""].moments.mean[0], mean, rtol=1e-5)


def test_a_new_batch_size_starts_anew() -> None:
    model = nn.BatchNorm1d(2)
    for sizes, expected in (([64, 16, 16, 16, 16], (16, 3)), ([4, 4, 4, 16, 16, 16], (16, 2)), ([8, 8, 3, 8], (8, 3))):
        with stochbn.track(model) as tracker:
            for size in sizes:
                model(torch.randn(size, 2))
        stats = tracker.distribution()
        assert (stats.batch_size, stats.num_batches) == expected


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
    with pytest.raises(ValueError, match=r"at least 2 training batches of one size inside track, got 0.*not compiled"):
        tracker.distribution()


@pytest.mark.parametrize("momentum", [0, 1, -0.1, math.nan])
def test_bad_momentum(model: nn.Module, momentum: float) -> None:
    with pytest.raises(ValueError, match="momentum between 0 and 1"), stochbn.track(model, momentum):
        pass


def test_track_reports_non_finite_statistics() -> None:
    model = nn.BatchNorm1d(2)
    with stochbn.track(model), pytest.raises(ValueError, match="NaN or Inf in layer ''"):
        model(torch.full((4, 2), math.nan))


def test_compiled_models_cannot_be_watched(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"not compiled, got one behind torch.compile.*stochbn.fit"):
        stochbn.track(torch.compile(model, backend="eager")).__enter__()


def test_fit_and_predict_within_the_context(model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    model.train()
    with stochbn.track(model) as tracker:
        for batch in batches:
            model(batch)
            stats = stochbn.fit(model, batches[:3], progress=False)
            stochbn.predict(model, stats, x, num_samples=2)
    assert tracker.distribution().num_batches == len(batches)


def test_ctrl_c_in_a_forward_pass_leaves_no_context_behind() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Identity()).train()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model[1].register_forward_pre_hook(interrupt)
    before = len(_get_current_function_mode_stack())
    with stochbn.track(model) as tracker:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(8, 2))
        handle.remove()
        for _ in range(3):
            model(torch.randn(8, 2))
        assert len(_get_current_function_mode_stack()) == before
        assert tracker.distribution().num_batches == 3
        handle = model[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(8, 2))
    assert len(_get_current_function_mode_stack()) == before
