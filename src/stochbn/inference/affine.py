"""BatchNorm with drawn statistics is an affine map: folded ahead for all draws, applied where torch would normalise."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stochbn.inference.sharing import Recording
from stochbn.statistics.channels_last import LAYOUT_DEPENDENT
from stochbn.statistics.layers import buffer_names
from stochbn.statistics.normalization import BatchNormCall, widen

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


def normalise_with(call: BatchNormCall, share: Tensor, num_inputs: int) -> Tensor:
    """Normalises each input by a mini-batch of which it is one: partly by the given statistics, partly by its own.

    Eq. 2 has x in its batch B, of which it is the part w = 1 / M. With x̄ and v the mean and variance of the input's own
    values in a channel, μ(B) is (1 − w) μ + w x̄; the second moment likewise, which gives
    σ²(B) = (1 − w) (σ² + w (x̄ − μ)²) + w v.

    Args:
        call: With x, (N, C, *), or (N · T, C, *) of a model that folds T parts of an input into the batch; and the
            statistics μ and σ² of a mini-batch as `running_mean` and `running_var`, (C,).
        share: w, a scalar.
        num_inputs: N.

    Examples:
        >>> x = torch.tensor([[[1.0, 5.0]]])
        >>> call = BatchNormCall(x, torch.tensor([0.0]), torch.tensor([1.0]), eps=0.0)
        >>> torch.allclose(normalise_with(call, torch.tensor(0.5), 1), (x - 1.5) / (0.5 * (1 + 3**2 / 2 + 4)) ** 0.5)
        True
    """
    x, mean, var = call.input, call.running_mean, call.running_var
    assert mean is not None
    assert var is not None
    if x.shape[0] % num_inputs:
        raise ValueError(
            f"Expected a BatchNorm layer to get a multiple of {num_inputs} inputs, one or more rows each, got "
            f"{x.shape[0]}: the model regroups its batch. Fit with conditioned=False."
        )
    wide = widen(x)
    share = share.to(wide.dtype)
    parts = wide.unflatten(0, (num_inputs, -1))  # (N, T, C, *)
    own_var, own_mean = torch.var_mean(parts, (1, *range(3, parts.dim())), correction=0)  # (N, C)
    distance = own_mean - mean
    scale = ((1 - share) * (var + share * distance.square()) + share * own_var).add(call.eps).rsqrt()
    if call.weight is not None:
        scale = scale * call.weight
    shift = -(mean + share * distance) * scale
    if call.bias is not None:
        shift = shift + call.bias
    scale, shift = (values.view(num_inputs, 1, -1, *(1 for _ in x.shape[2:])) for values in (scale, shift))
    return torch.addcmul(shift, parts, scale).flatten(0, 1).to(x.dtype)


# A drawn layer, its affine map, and what part of the mini-batch each input is itself; None if it is not counted.
DrawnLayer = tuple[nn.Module, Affine, Tensor | None]


class DrawnNormalization(TorchFunctionMode):
    """Context of a pass: answers torch's `batch_norm` by a drawn layer's affine map, and shares what it can.

    Args:
        layers: By the id of the drawn running mean.
        recording: Of the passes over this batch, if they may share.
        num_inputs: N, where inputs are counted into the mini-batches that normalise them.
        stacked: Whether the pass is under `vmap`, where not all can be had.
    """

    def __init__(
        self,
        layers: dict[int, DrawnLayer],
        recording: Recording | None = None,
        num_inputs: int = 0,
        stacked: bool = True,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.recording = recording
        self.num_inputs = num_inputs
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
        layer, affine, share = self.layers.get(id(call.running_mean), (None, None, None))
        # A class of its own may pass other parameters than the layer's, for which nothing was folded.
        plain = layer is not None and call.weight is layer.weight and call.bias is layer.bias and call.eps == layer.eps
        if affine is None or call.training or not (plain or share is not None):
            output: Tensor = self._call(F.batch_norm, tuple(call), {})
            return output
        if self.recording is not None:
            self.recording.stop(x)
        if share is not None:
            return normalise_with(call, share, self.num_inputs)
        scale, shift = affine
        if scale.dim() != x.dim() - 1:
            scale, shift = (values.view(-1, *(1 for _ in x.shape[2:])) for values in affine)
        output = torch.addcmul(shift, x, scale)
        return output if output.dtype == x.dtype else output.to(x.dtype)
