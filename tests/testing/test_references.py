"""The naive ways, against torch and by hand."""

import threading

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stochbn
from stochbn.testing.references import copy_model, count_in, hooked_statistics, naive_outputs


def own_buffers(model: nn.Module) -> stochbn.Draws:
    ends = ("running_mean", "running_var")
    return stochbn.Draws({name: b[None].clone() for name, b in model.named_buffers() if name.endswith(ends)})


def test_a_draw_of_its_own_buffers_is_the_model(model: nn.Module, x: Tensor) -> None:
    expected = model(x).detach()
    draws = own_buffers(model)
    assert torch.equal(naive_outputs(model.train(), draws, x)[0], expected)
    logits = naive_outputs(model, draws, {"x": x}, call=lambda model, item: -model(item["x"]))
    assert torch.equal(logits[0], -expected)


def test_a_changed_copy_leaves_the_model_alone(model: nn.Module, x: Tensor) -> None:
    before = model(x).detach()
    changed = naive_outputs(model, own_buffers(model), x, change=lambda network: network[-1].weight.data.zero_())
    assert torch.equal(changed[0], model[-1].bias.detach().expand(7, -1))
    assert torch.equal(model(x), before)


def test_hooks_see_what_torch_normalises_by(model: nn.Module, batches: list[Tensor]) -> None:
    seen = hooked_statistics(model, batches)
    assert list(seen) == ["1", "4", "7"]
    first = model[0](batches[3]).detach()
    var, mean = torch.var_mean(first, (0, 2, 3), correction=0)
    np.testing.assert_allclose(seen["1"][3], torch.stack([mean, (var + 1e-5).log()]), rtol=1e-5, atol=1e-5)
    normalised = F.batch_norm(first, None, None, model[1].weight, model[1].bias, True)
    second = model[3](normalised.relu())
    np.testing.assert_allclose(seen["4"][3, 0], second.mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-5)
    alone = hooked_statistics(model, batches, layers=["4"])
    assert list(alone) == ["4"]
    second = model[:4](batches[3])  # the first layer keeps to its running statistics
    np.testing.assert_allclose(alone["4"][3, 0], second.mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-5)
    assert not model[1].training


def test_an_input_is_counted_into_a_mini_batch() -> None:
    """Of nine, eight have the drawn statistics: half of them μ + σ, half μ − σ."""
    layer = nn.BatchNorm1d(3).double().eval()
    mean, std = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    draws = stochbn.Draws({"running_mean": mean[None], "running_var": std[None] ** 2})
    x = 3 * torch.randn(1, 3, dtype=torch.float64)
    others = torch.stack([mean + std, mean - std]).repeat(4, 1)
    expected = F.batch_norm(torch.cat([x, others]), None, None, training=True)[:1]
    found = naive_outputs(layer, draws, x, change=lambda network: count_in(network, [""], share=1 / 9))
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)
    apart = naive_outputs(layer, draws, x, change=lambda network: count_in(network, [], share=1 / 9))
    torch.testing.assert_close(apart[0], (x - mean) / (std**2 + layer.eps).sqrt(), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_copied_deeply_has_tensors_of_its_own_all_the_same() -> None:
    model = nn.BatchNorm1d(2)
    model.lock = threading.Lock()
    copied = copy_model(model)
    copied.running_mean.add_(1)
    assert model.running_mean.sum() == 0
