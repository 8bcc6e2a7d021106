"""Naive ways to what the package computes: slow, short, and written apart from its own."""

import copy
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stochbn.distributions.draws import Draws
from stochbn.statistics.calls import Call, call_on_inputs, call_on_item, device_of
from stochbn.statistics.items import copy_to
from stochbn.statistics.layers import all_batch_norms
from stochbn.statistics.twin import make_snapshot

if TYPE_CHECKING:
    import numpy as np


def naive_outputs(
    model: nn.Module,
    draws: Draws,
    inputs: Any,
    *,
    call: Call | None = None,
    change: Callable[[nn.Module], None] = lambda network: None,
) -> Tensor:
    """Runs a deep copy of the model for each draw, with the draw in its buffers: raw outputs, (S, N, …).

    Args:
        model: Left as it is.
        draws: With values for the buffers.
        inputs: One batch.
        call: As in `predict`.
        change: What else is done to each copy.

    Examples:
        >>> draws = Draws({"running_mean": torch.tensor([[0.0], [1.0]]), "running_var": torch.ones(2, 1)})
        >>> naive_outputs(nn.BatchNorm1d(1, eps=0.0), draws, torch.tensor([[3.0]])).flatten()
        tensor([3., 2.])
    """
    outputs: list[Tensor] = []
    for index in range(len(draws)):
        network = copy_model(model).eval()
        for name, buffer in network.named_buffers():
            if name in draws.buffers:
                buffer.copy_(draws.buffers[name][index])
        change(network)
        with torch.no_grad():
            output: Any = (call or call_on_inputs)(network, copy_to(inputs, device_of(network)))
        outputs.append(getattr(output, "logits", output))
    return torch.stack(outputs)


def count_in(network: nn.Module, layers: Collection[str], share: float) -> None:
    """Has each layer normalise its one input by statistics of which that is a share: the two moments, mixed."""

    def mix(drawn: tuple[Tensor, Tensor], layer: Any, inputs: tuple[Tensor, ...]) -> None:
        mean, var = drawn
        x = inputs[0].double()
        own, axes = x.mean([0, *range(2, x.dim())]), [0, *range(2, x.dim())]
        mixed = (1 - share) * mean + share * own
        second = (1 - share) * (var + mean.square()) + share * x.square().mean(axes)
        layer.running_mean.copy_(mixed)
        layer.running_var.copy_(second - mixed.square())

    for name, layer in all_batch_norms(network).items():
        if name in layers:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            drawn = layer.running_mean.double().clone(), layer.running_var.double().clone()
            layer.register_forward_pre_hook(functools.partial(mix, drawn))


def hooked_statistics(
    model: nn.Module, mini_batches: Iterable[Any], *, layers: Collection[str] | None = None, call: Call | None = None
) -> "dict[str, np.ndarray[Any, Any]]":
    """Runs a deep copy with its layers in training mode, and returns what hooks saw: (calls, 2, C), in float64.

    Args:
        model: Left as it is.
        mini_batches: Of M examples each.
        layers: Names of the layers that normalise by the batch; by default all.
        call: As in `fit`.

    Examples:
        >>> hooked_statistics(nn.BatchNorm1d(1, eps=1.0), [torch.tensor([[1.0], [3.0]])])[""].round(3)
        array([[[2.   ], [0.693]]])
    """
    import numpy as np

    network = copy_model(model).eval()
    seen: dict[str, list[Any]] = {}

    def note(name: str, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].detach().cpu().double().numpy()
        axes = (0, *range(2, values.ndim))
        moments = [values.mean(axes), np.log(values.var(axes) + layer.eps)]
        seen.setdefault(name, []).append(np.stack(moments))

    for name, layer in all_batch_norms(network).items():
        if layers is None or name in layers:
            layer.training = True
            layer.register_forward_pre_hook(functools.partial(note, name))
    with torch.no_grad():
        for item in mini_batches:
            (call or call_on_item)(network, copy_to(item, device_of(network)))
    return {name: np.stack(values) for name, values in seen.items()}


def copy_model(model: nn.Module) -> nn.Module:
    """Returns a deep copy, or the nearest to it."""
    try:
        return copy.deepcopy(model)
    except Exception:  # it holds a lock, say, which a snapshot shares with it
        return make_snapshot(model)
