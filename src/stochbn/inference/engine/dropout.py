"""A draw's dropout mask: a pure function of seed, draw, layer and unit.

In prediction a draw is a network, so its mask is the same for every input, and does not depend on the batch, the
chunk or the device. A generator could not give that under `vmap`; a hash of (seed, draw, layer, unit) can.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stochbn.distributions.seeds import derive_seed
from stochbn.inference.engine.affine import Affine
from stochbn.statistics.layers import dropout_layers

_WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_ALPHA = -1.7580993408473766  # SELU's value at −∞, to which alpha dropout sets a unit


def _signed(value: int) -> int:
    """Wraps an integer to 64 bits, two's complement."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(h: Tensor) -> Tensor:
    """Scrambles int64 by SplitMix64's finaliser. Shifts are made logical: int64's own keep the sign."""
    h = (h ^ ((h >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ ((h >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return h ^ ((h >> 31) & (2**33 - 1))


def hashed_uniform(key: int, draw: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns numbers in [0, 1), a function of key, draw and position alone: (*) → (*, *shape), float64."""
    stream = _mix(draw * _signed(0x9E3779B97F4A7C15) + key)
    position = _mix(torch.arange(1, torch.Size(shape).numel() + 1, device=draw.device).view(shape))
    stream = stream.view(*draw.shape, *(1 for _ in shape))
    return ((_mix(stream + position) >> 11) & (2**53 - 1)).double() * 2.0**-53


def dropout_map(layer: _DropoutNd, key: int, draw: Tensor, units: tuple[int, ...], dtype: torch.dtype) -> Affine:
    """Returns what a dropout layer multiplies its input by and adds to it in each draw: (*) → (*, *units).

    Args:
        layer: Of any of torch's kinds.
        key: Tells layers, and calls of one layer, apart.
        draw: (*) indices.
        units: The shape of an input, without the batch.
        dtype: Of the maps.
    """
    if isinstance(layer, _WHOLE_CHANNELS):
        units = (*units[:1], *(1 for _ in units[1:]))
    keep = (hashed_uniform(key, draw, units) >= layer.p).to(dtype)
    if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        scale = ((1 - layer.p) * (1 + layer.p * _ALPHA**2)) ** -0.5 if layer.p < 1 else 0.0
        return keep * scale, (_ALPHA * (1 - keep) - _ALPHA * layer.p) * scale
    return (keep / (1 - layer.p) if layer.p < 1 else keep), None


def dropout_key(seed: int, name: str, call: int) -> int:
    """Returns the key of a layer's masks in its n-th call of a pass, from 1."""
    return derive_seed(seed, "dropout", name, call)


class DropoutSites:
    """Has a function answer for every dropout layer of a model in eval mode, which must be our own: it sets hooks.

    Args:
        model: A twin.
        answer: Takes layer, name, number of the call in this pass, and what the layer returned, its input.
    """

    def __init__(self, model: nn.Module, answer: Callable[[_DropoutNd, str, int, Tensor], Tensor]) -> None:
        self._answer = answer
        self._calls: dict[str, int] = {}
        for name, layer in dropout_layers(model).items():
            layer.register_forward_hook(self._make_hook(name))

    def begin(self) -> None:
        """Starts a forward pass."""
        self._calls.clear()

    def _make_hook(self, name: str) -> Callable[..., Any]:
        def hook(layer: _DropoutNd, _: Any, output: Tensor) -> Tensor:
            self._calls[name] = call = self._calls.get(name, 0) + 1
            return self._answer(layer, name, call, output)

        return hook


@torch.library.custom_op("stochbn::dropout_site", mutates_args=())
def _site(x: Tensor, name: str, call: int) -> Tensor:
    return x.clone()


@_site.register_fake
def _(x: Tensor, name: str, call: int) -> Tensor:
    return torch.empty_like(x)


DROPOUT_SITE = torch.ops.stochbn.dropout_site.default


def mark_dropout(_: _DropoutNd, name: str, call: int, x: Tensor) -> Tensor:
    """Leaves a mark in a graph where a dropout layer stands: in eval mode it would leave none."""
    marked: Tensor = DROPOUT_SITE(x, name, call)
    return marked
