"""A source of draws → some of them, ready for the model: made ahead, in blocks, by seed and index."""

import warnings
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.statistics.calls import device_of

Source = Distribution | Draws | None

# Draws are made ahead, in blocks of at most so many numbers (32 MB in float64).
BLOCK_NUMBERS = 2**22
FIRST_DRAWS = 64  # before it is known how many numbers a draw has


class Drawn(NamedTuple):
    """Some draws, each tensor with one row a draw.

    Buffers by name; by layer, what part of its mini-batch an input is; and the draws' indices.
    """

    buffers: dict[str, Tensor]
    shares: dict[str, Tensor]
    indices: Tensor


class Sampler:
    """The draws of one model. Threads may share it.

    `layers` are the BatchNorm layers whose statistics are drawn, `conditioned` those of them where inputs are counted
    into their mini-batches.

    Args:
        model: The model that they are for.
        source: Where they come from; None for networks that differ in their dropout masks alone.
        num_samples: S, unless `source` brings its own.
        seed: Makes them.
        num_masks: After so many draws, dropout's masks begin again.
    """

    def __init__(
        self, model: nn.Module, source: Source, *, num_samples: int, seed: int, num_masks: int | None = None
    ) -> None:
        self._model = model
        self._source = source
        self._seed = seed
        self._num_masks = num_masks
        self._device = device_of(model)
        self._block = (range(0), Drawn({}, {}, torch.arange(0, device=self._device)))  # the draws at hand
        self.num_draws = len(source) if isinstance(source, Draws) else num_samples
        self.temperature = 1.0
        if source is not None:
            whole = isinstance(source, Draws)
            self._load(range(self.num_draws if whole else min(FIRST_DRAWS, self.num_draws)))
        block, end = self._block[1], "running_mean"
        self.layers = tuple(name.removesuffix(end).removesuffix(".") for name in block.buffers if name.endswith(end))
        self.conditioned = tuple(block.shares)

    def take(self, start: int, stop: int) -> Drawn:
        """Returns successive draws."""
        if self._source is None:
            return Drawn({}, {}, self._indices(range(start, stop)))
        draws, block = self._block
        if not (start in draws and stop - 1 in draws):
            numbers = sum(values[0].numel() for values in block.buffers.values())
            ahead = max(stop - start, BLOCK_NUMBERS // numbers)
            draws, block = self._load(range(start, min(start + ahead, self.num_draws)))
        part = slice(start - draws[0], stop - draws[0])
        buffers, shares = (
            {name: values[part] for name, values in mapping.items()} for mapping in (block.buffers, block.shares)
        )
        return Drawn(buffers, shares, block.indices[part])

    def _indices(self, draws: range) -> Tensor:
        index = torch.arange(draws.start, draws.stop, device=self._device)
        return index if self._num_masks is None else index % self._num_masks

    def _load(self, draws: range) -> tuple[range, Drawn]:
        if isinstance(self._source, Distribution):
            made = _sample(self._source, len(draws), self._seed, draws[0])
        else:
            assert self._source is not None
            made = self._source
        self.temperature = made.temperature
        made = made.match(self._model)
        self._block = block = (draws, Drawn(dict(made.buffers), dict(made.shares), self._indices(draws)))
        return block


def _sample(source: Distribution, count: int, seed: int, first: int) -> Draws:
    """Draws networks, or returns the last ones of a fitted distribution if they are asked for again."""
    asked = (count, seed, first)
    last = _LAST.get(source)
    if last is not None and last[0] == asked:
        return last[1]
    draws = source.sample(count, seed=seed, first=first)
    if detect_fake_mode() is None:  # or they are no numbers
        _LAST[source] = (asked, draws)
    return draws


# One input after the other asks for the same networks again and again, and drawing them can take as long as a pass.
_LAST: "WeakKeyDictionary[Distribution, tuple[tuple[int, int, int], Draws]]" = WeakKeyDictionary()


def warn_of_dropout(source: Distribution, dropout: bool, stacklevel: int) -> None:
    """Warns of statistics that were fitted under another rule."""
    if source.dropout != dropout:
        warnings.warn(
            f"The statistics were fitted with dropout={source.dropout} and are used with dropout={dropout}; "
            "fit them with the same.",
            stacklevel=stacklevel,
        )
