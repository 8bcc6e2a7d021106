"""A joint Gaussian of low rank: the strongest of the correlations between channels and layers, and independent rests.

The principal directions are followed in the pass that `fit` makes anyway, in bounded memory.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stochbn.distributions.base import Distribution, common_fields
from stochbn.distributions.seeds import antithetic_normal


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

    def add(self, rows: Tensor) -> None:
        if self._scale is None:  # what moves a normalised activation by one: μ by σ, log σ² by 2
            sigma = (rows[:, 1].mean(0) / 2).exp()
            self._scale = torch.stack([sigma, torch.full_like(sigma, 2)])
        self._pending.append((rows / self._scale).flatten(1))
        if sum(map(len, self._pending)) >= self._num_rows:
            self._compress()

    def _compress(self) -> None:
        new = torch.cat(self._pending)
        self._pending = []
        mean, total = new.mean(0), self._count + len(new)
        stack = new - mean
        if self._count:
            change = math.sqrt(self._count * len(new) / total) * (mean - self._mean)
            stack = torch.cat([self._matrix, stack, change[None]])
            mean = self._mean + (mean - self._mean) * (len(new) / total)
        _, directions = torch.linalg.eigh(stack @ stack.T)  # ascending
        self._matrix = directions[:, -self._num_rows :].T @ stack
        self._mean, self._count = mean, total

    def distribution(self, moments: Distribution) -> "LowRank":
        if self._pending:
            self._compress()
        assert self._scale is not None
        strongest = self._matrix.flip(0)[: self._rank] / math.sqrt(max(1, self._count - 1))
        return LowRank(**common_fields(moments), factors=(strongest.view(-1, *self._scale.shape) * self._scale).float())


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
