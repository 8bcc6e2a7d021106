"""BatchNorm with drawn statistics is an affine map: folded ahead for all draws, applied where torch would normalise."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stochbn.batches import widen
from stochbn.sharing import Recording
from stochbn.statistics import LAYOUT_DEPENDENT, BatchNormCall, buffer_names

Affine = tuple[Tensor, Tensor]

_SPACE = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


def fold(layers: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Makes γ (x − μ) / sqrt(σ² + ε) + β one scale and shift a channel, (S, C) each, in float32 or better.

    Args:
        layers: BatchNorm layers by name; those without drawn buffers are left out.
        buffers: `{"model." + buffer name: (S, C)}`.
    """
    affines = {}
    for name, layer in layers.items():
        mean_name, var_name = (f"model.{buffer}" for buffer in buffer_names(name))
        if mean_name in buffers:
            mean, var = widen(buffers[mean_name]), widen(buffers[var_name])
            scale = (var + layer.eps).rsqrt() * (1.0 if layer.weight is None else layer.weight)
            shift = -mean * scale + (0.0 if layer.bias is None else layer.bias)
            space = (1,) * _SPACE.get(type(layer), 0)  # as the layer's input most likely has it
            affines[name] = (scale.view(*scale.shape, *space), shift.view(*shift.shape, *space))
    return affines


def _average_pool(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002, the name it is called by
    """Pools as torch does; to one value as a mean, which `vmap` can stack in every memory format."""
    if output_size in (1, (1,), [1], (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, output_size)


class Condition(NamedTuple):
    """Says that each input is one of the mini-batch that normalises it: M, and how many inputs there are."""

    batch_size: int
    num_inputs: int


def normalise_with(call: BatchNormCall, condition: Condition) -> Tensor:
    """Normalises each input by a mini-batch of which it is one: M − 1 parts the given statistics, one part its own.

    Eq. 2 has x in its batch B. With x̄ and v the mean and variance of the input's own values in a channel, μ(B) is
    ((M − 1) μ + x̄) / M; the second moment likewise, which gives σ²(B) = ((M − 1) (σ² + (x̄ − μ)² / M) + v) / M.

    Args:
        call: With x, (N, C, *), or (N · T, C, *) of a model that folds T parts of an input into the batch; and the
            statistics μ and σ² of a mini-batch as `running_mean` and `running_var`, (C,).
        condition: M and N.

    Example:
        >>> x = torch.tensor([[[1.0, 5.0]]])
        >>> call = BatchNormCall(x, torch.tensor([0.0]), torch.tensor([1.0]), eps=0.0)
        >>> torch.allclose(normalise_with(call, Condition(2, 1)), (x - 1.5) / (0.5 * (1 + 3**2 / 2 + 4)) ** 0.5)
        True
    """
    size, num_inputs = condition
    x, mean, var = call.input, call.running_mean, call.running_var
    assert mean is not None
    assert var is not None
    if x.shape[0] % num_inputs:
        raise ValueError(
            f"Expected a BatchNorm layer to get a multiple of {num_inputs} inputs, one or more rows each, got "
            f"{x.shape[0]}: the model regroups its batch. Fit with conditioned=False."
        )
    wide = widen(x)
    parts = wide.unflatten(0, (num_inputs, -1))  # (N, T, C, *)
    own_var, own_mean = torch.var_mean(parts, (1, *range(3, parts.dim())), correction=0)  # (N, C)
    distance = own_mean - mean
    scale = ((size - 1) * (var + distance.square() / size) + own_var).div(size).add(call.eps).rsqrt()
    if call.weight is not None:
        scale = scale * call.weight
    shift = -(mean + distance / size) * scale
    if call.bias is not None:
        shift = shift + call.bias
    scale, shift = (values.view(num_inputs, 1, -1, *(1 for _ in x.shape[2:])) for values in (scale, shift))
    return torch.addcmul(shift, parts, scale).flatten(0, 1).to(x.dtype)


class DrawnNormalization(TorchFunctionMode):
    """Context of a pass: answers torch's `batch_norm` by a drawn layer's affine map, and shares what it can.

    Args:
        layers: `{id of a drawn running mean: (layer, affine)}`.
        recording: Of the passes over this batch, if they may share.
        condition: If an input is to be counted into the mini-batch that normalises it.
        stacked: Whether the pass is under `vmap`, where not all can be had.
    """

    def __init__(
        self,
        layers: dict[int, tuple[nn.Module, Affine]],
        recording: Recording | None = None,
        condition: Condition | None = None,
        stacked: bool = True,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.recording = recording
        self.condition = condition
        self.stacked = stacked
        self.most_bytes = 0  # of what a draw normalises at once

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._normalise(BatchNormCall(*args, **kwargs))
        if self.stacked and func is F.adaptive_avg_pool2d:
            func = _average_pool
        elif self.stacked and func in LAYOUT_DEPENDENT:
            raise NotImplementedError(f"{func.__name__} depends on how a tensor lies in memory")
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs) if self.recording is None else self.recording.call(func, args, kwargs)

    def _normalise(self, call: BatchNormCall) -> Tensor:
        x = call.input
        self.most_bytes = max(self.most_bytes, x.numel() * x.element_size())
        layer, affine = self.layers.get(id(call.running_mean), (None, None))
        # A class of its own may pass other parameters than the layer's, for which nothing was folded.
        plain = layer is not None and call.weight is layer.weight and call.bias is layer.bias and call.eps == layer.eps
        if affine is None or call.training or not (plain or self.condition):
            output: Tensor = self._call(F.batch_norm, tuple(call), {})
            return output
        if self.recording is not None:
            self.recording.stop(x)
        if self.condition is not None:
            return normalise_with(call, self.condition)
        scale, shift = affine
        if scale.dim() != x.dim() - 1:
            scale, shift = (values.view(-1, *(1 for _ in x.shape[2:])) for values in affine)
        output = torch.addcmul(shift, x, scale)
        return output if output.dtype == x.dtype else output.to(x.dtype)
