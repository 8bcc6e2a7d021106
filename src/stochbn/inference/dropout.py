"""A draw's dropout mask: a pure function of seed, draw, layer and unit.

In prediction a draw is a network, so its mask is the same for every input, and does not depend on the batch, the
chunk or the device. A generator could not give that under `vmap`; a hash of (seed, draw, layer, unit) can.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stochbn.distributions.seeds import derive_seed
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
    """Returns numbers in [0, 1), a function of key, draw and position alone: () → `shape`, float64."""
    stream = _mix(draw * _signed(0x9E3779B97F4A7C15) + key)
    # The position is scrambled before it is added: a product of it the compiler takes for an offset, without overflow.
    position = _mix(torch.arange(1, torch.Size(shape).numel() + 1, device=draw.device).view(shape))
    return ((_mix(stream + position) >> 11) & (2**53 - 1)).double() * 2.0**-53


class DropoutMasks:
    """Active masks of one network; set `draw`, a 0-d int64 tensor (batched under vmap), before each forward pass."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._calls: dict[str, int] = {}

    def select(self, draw: Tensor) -> None:
        """Chooses the draw for the coming forward pass."""
        self.draw = draw
        self._calls.clear()

    def hook(self, name: str) -> Callable[..., Any]:
        """Makes a forward hook that replaces what a dropout layer in eval mode returns, its input."""

        def apply(layer: _DropoutNd, args: tuple[Any, ...], output: Tensor) -> Tensor:
            call = self._calls[name] = self._calls.get(name, 0) + 1
            key = derive_seed(self.seed, "dropout", name, call)
            units = tuple(output.shape[1:])
            if isinstance(layer, _WHOLE_CHANNELS):
                units = (*units[:1], *(1 for _ in units[1:]))
            keep = (hashed_uniform(key, self.draw, units) >= layer.p).to(output.dtype)
            if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
                scale = ((1 - layer.p) * (1 + layer.p * _ALPHA**2)) ** -0.5 if layer.p < 1 else 0.0
                return (output * keep + _ALPHA * (1 - keep)) * scale - scale * _ALPHA * layer.p
            return output * (keep / (1 - layer.p) if layer.p < 1 else keep)

        return apply


@contextmanager
def dropout_masks(model: nn.Module, seed: int) -> Iterator[DropoutMasks]:
    """Makes the dropout layers of a model in eval mode drop units by draw; removes its hooks on exit."""
    masks = DropoutMasks(seed)
    hooks = []
    try:
        for name, layer in dropout_layers(model).items():
            hooks.append(layer.register_forward_hook(masks.hook(name)))
        yield masks
    finally:
        for hook in hooks:
            hook.remove()
