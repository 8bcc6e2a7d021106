"""A joint Gaussian of low rank: the strongest of the correlations between channels and layers, and independent rests.

The principal directions are followed in the pass that `fit` makes anyway, in bounded memory.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stochbn.distributions.base import Distribution, common_fields
from stochbn.distributions.seeds import antithetic_normal
from stochbn.statistics.checks import check_whole

if TYPE_CHECKING:
    from typing_extensions import Self


class Sketch:
    """Follows the principal directions of a stream of rows in bounded memory, for `LowRank`.

    Of the scatter Σ (z − z̄)(z − z̄)ᵀ so far it keeps the leading part, as a few rows whose outer products add up to it;
    new rows are stacked below, with one for the change of the mean (Chan's formula), and the stack is cut back.
    """

    def __init__(self, rank: int = 10) -> None:
        self._rank = rank
        self._num_rows = 4 * rank + 20  # of the sketch: so many that what is cut off on the way is small
        self._pending: list[Tensor] = []
        self._scale: Tensor | None = None
        self._count = 0
        self._mean = torch.zeros(0, device="cpu")
        self._matrix = torch.zeros(0, device="cpu")

    def start_at(self, index: int) -> None:
        """Does nothing: directions do not depend on where the rows stand."""

    def add(self, rows: Tensor) -> None:
        if self._scale is None:  # that of the first rows serves on the way
            self._scale = _effect(rows[:, 1].mean(0))
        self._pending.append((rows / self._scale).flatten(1))
        if sum(map(len, self._pending)) >= self._num_rows:
            self._compress()

    def merge(self, other: "Sketch") -> None:
        assert self._scale is not None
        assert other._scale is not None
        self._compress()
        other._compress()
        ratio = (other._scale / self._scale).flatten()
        self._absorb(other._matrix * ratio, other._mean * ratio, other._count)

    def _compress(self) -> None:
        if self._pending:
            new = torch.cat(self._pending)
            self._pending = []
            self._absorb(new - new.mean(0), new.mean(0), len(new))

    def _absorb(self, stack: Tensor, mean: Tensor, count: int) -> None:
        """Takes in rows around their mean, or fewer that have their scatter."""
        total = self._count + count
        if self._count:
            change = math.sqrt(self._count * count / total) * (mean - self._mean)
            stack = torch.cat([self._matrix, stack, change[None]])
            mean = self._mean + (mean - self._mean) * (count / total)
        _, directions = torch.linalg.eigh(stack @ stack.T)  # ascending
        self._matrix = directions[:, -self._num_rows :].T @ stack
        self._mean, self._count = mean, total

    def distribution(self, moments: Distribution) -> "LowRank":
        self._compress()
        assert self._scale is not None
        # In the units of all mini-batches, or the fit in parts would have the directions of its first part.
        scale = _effect(moments.centre[1])
        stack = self._matrix * (self._scale / scale).flatten()
        _, directions = torch.linalg.eigh(stack @ stack.T)  # ascending
        strongest = (directions.T @ stack).flip(0)[: self._rank] / math.sqrt(max(1, self._count - 1))
        # Nor has a direction a sign of its own.
        largest = strongest.gather(1, strongest.abs().argmax(1, keepdim=True))
        strongest = torch.where(largest < 0, -strongest, strongest)
        return LowRank(**common_fields(moments), factors=(strongest.view(-1, *scale.shape) * scale).float())


def _effect(log_variance: Tensor) -> Tensor:
    """Returns what μ and log(σ² + ε) of each channel move by when a normalised activation moves by one, (2, C)."""
    sigma = (log_variance / 2).exp()
    return torch.stack([sigma, torch.full_like(sigma, 2)])


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Distribution):
    """A Gaussian over all layers at once: a few common factors, and for each channel what they leave unexplained.

    Every channel has the mean and variance of the factorised family. Factors are the principal directions of the
    observed statistics, in units of what they do to normalised activations.

    Attributes:
        factors: (R, 2, ΣC), what a standard Normal number moves μ and log(σ² + ε) by; the strongest first.

    Examples:
        >>> import stochbn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, family="lowrank", rank=2, progress=False)
        >>> stats.factors.shape
        torch.Size([2, 2, 3])
    """

    factors: Tensor = field(kw_only=True)

    family = "lowrank"
    array = "factors"
    collector = Sketch

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Draws common factors and independent remainders."""
        factors = self.factors.double()
        remainder = (self.std.square() - factors.square().sum(0)).clamp_min(0).sqrt()
        noise = antithetic_normal(seed, first, count, len(factors) + remainder.numel()).to(factors.device)
        common, own = noise.split([len(factors), remainder.numel()], dim=1)
        drawn: Tensor = common @ factors.flatten(1) + remainder.flatten() * own
        return drawn.view(-1, *remainder.shape)

    def merge(self, other: "Self", *, rank: int | None = None) -> "Self":
        """Joins two fits of one model to parts of its data: the fit to the whole, to be tuned again. Changes nothing.

        Moments are merged to rounding. Factors are the principal directions of what both have, which is less than
        what both saw: a fit cuts off all but its strongest. (`stochbn.distributed.fit` merges before that cut.)

        Args:
            other: The other fit.
            rank: How many factors to keep; by default as many as the one with more of them has.
        """
        most = max(len(self.factors), len(other.factors)) if rank is None else check_whole("rank", rank, 1)
        joined = super().merge(other)
        sketches = [Sketch(most), Sketch(most)]
        for sketch, stats in zip(sketches, (self, other), strict=True):
            sketch._scale = _effect(joined.centre[1])
            scaled = stats.factors.double() / sketch._scale * math.sqrt(max(1, stats.num_batches - 1))
            sketch._absorb(scaled.flatten(1), (stats.centre / sketch._scale).flatten(), stats.num_batches)
        sketches[0].merge(sketches[1])
        return replace(joined, factors=sketches[0].distribution(joined).factors)
