"""Passes on a twin: all draws together are the draws one by one."""

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import naive
from stochbn.inference.engine.stacking import Drawn, Stacking
from stochbn.statistics.calls import call_on_inputs


def test_together_and_one_by_one(dropout_model: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    stats = stochbn.fit(dropout_model, batches, progress=False)
    draws = stats.sample(6, seed=0)
    drawn = Drawn(dict(draws.match(dropout_model).buffers), {}, torch.arange(6))
    for seed in (None, 3):
        stacking = Stacking(dropout_model, call_on_inputs, seed)
        with torch.no_grad():
            together, apart = stacking.run(drawn, x), stacking.run_one_by_one(drawn, x)
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
        if seed is None:
            expected = naive(dropout_model, draws, x)
            torch.testing.assert_close(apart.softmax(2), expected, rtol=1e-4, atol=1e-5)
        else:
            assert (apart[0] - apart[1]).abs().max() > 1e-2


def test_what_a_model_returns_is_checked(x: Tensor) -> None:
    class Several(nn.Sequential):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": super().forward(x)}

    stacking = Stacking(Several(nn.Flatten()), call_on_inputs, None)
    with pytest.raises(TypeError, match=r"floating-point tensor with a row an input, got dict.*call=lambda"):
        stacking.run_one_by_one(Drawn({}, {}, torch.arange(1)), x)


def test_what_fails_once_is_tried_again(
    model: nn.Module, stats: stochbn.Factorized, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors: none says that the model cannot be vectorised, now or later."""
    expected = stochbn.predict(model, stats, x, num_samples=4).samples
    run, faults = Stacking.run, [RuntimeError("no memory")]

    def fail_once(self: Stacking, draws: Drawn, item: Tensor) -> Tensor:
        if faults:
            raise faults.pop()
        return run(self, draws, item)

    monkeypatch.setattr(Stacking, "run", fail_once)
    looped: list[Drawn] = []
    monkeypatch.setattr(Stacking, "run_one_by_one", lambda self, draws, item: looped.append(draws))
    for _ in range(2):
        assert torch.equal(stochbn.predict(model, stats, x, num_samples=4).samples, expected)
    assert not looped
