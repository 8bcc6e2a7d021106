"""Statistics of real mini-batches, kept as they are: what the factorised r(μ) r(σ) throws away, their correlations.

One mini-batch gives every channel of every layer its statistics at once. Some of these observations are kept, in the
pass that `fit` makes anyway.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stochbn.distributions.base import Distribution, common_fields
from stochbn.distributions.seeds import derive_seed
from stochbn.statistics.checks import check_whole

if TYPE_CHECKING:
    from typing_extensions import Self


class Thinned:
    """Keeps at most `num_kept` rows of a stream, spread evenly over it, for `Empirical`.

    On the way these are the rows whose index is a multiple of a stride, which doubles when they have become too many.
    So parts of a stream that know where they start can be merged into what the whole would have kept, row by row.
    """

    def __init__(self, num_kept: int = 256) -> None:
        self._num_kept = num_kept
        self._stride = 1
        self._first = 0
        self._seen = 0  # index of the next row
        self._rows: list[Tensor] = []

    def start_at(self, index: int) -> None:
        self._first = self._seen = index

    def add(self, rows: Tensor) -> None:
        self._rows += rows[-self._seen % self._stride :: self._stride].float()
        self._seen += len(rows)
        self._thin()

    def merge(self, other: "Thinned") -> None:
        for one, stride in ((self, other._stride), (other, self._stride)):
            while one._stride < stride:
                one._halve()
        self._rows += other._rows
        self._seen += other._seen - other._first
        self._thin()

    def _thin(self) -> None:
        while len(self._rows) >= 2 * self._num_kept:
            self._halve()

    def _halve(self) -> None:
        before = -(-self._first // self._stride)  # multiples of the stride that lie before the first row
        self._rows = self._rows[before % 2 :: 2]
        self._stride *= 2

    def distribution(self, moments: Distribution) -> "Empirical":
        kept = _spread_evenly(torch.stack(self._rows), self._num_kept)
        return Empirical(**common_fields(moments), observations=kept)


def _spread_evenly(rows: Tensor, most: int) -> Tensor:
    """Returns at most so many of some rows, spread evenly over them."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, dtype=torch.float64, device="cpu").round().long()]


@dataclass(frozen=True, eq=False, repr=False)
class Empirical(Distribution):
    """Statistics of real mini-batches, joint over channels and layers: what exact inference samples, without a batch.

    At spread 1 a draw *is* one of the mini-batches that were kept. Each comes once before any comes again.

    Attributes:
        observations: (B, 2, ΣC) μ and log(σ² + ε) of B mini-batches, spread evenly over those of the fit.

    Examples:
        >>> import stochbn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, family="empirical", progress=False)
        >>> stats.observations.shape
        torch.Size([10, 2, 3])
    """

    observations: Tensor = field(kw_only=True)

    family = "empirical"
    array = "observations"
    collector = Thinned

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Takes mini-batches in a random order, which is another one in each round through all of them."""
        size = len(self.observations)
        rounds = range(first // size, (first + count - 1) // size + 1)
        generator = torch.Generator("cpu")
        orders = [
            torch.randperm(size, generator=generator.manual_seed(derive_seed(seed, "order", number)), device="cpu")
            for number in rounds
        ]
        index = torch.cat(orders)[first % size :][:count]
        return self.observations[index.to(self.observations.device)].double() - self.centre

    def merge(self, other: "Self", *, num_kept: int | None = None) -> "Self":
        """Joins two fits of one model to parts of its data: the fit to the whole, to be tuned again. Changes nothing.

        Moments are merged to rounding. Mini-batches are kept as they are: all of both, where each kept all of its own.
        Where one kept a smaller part, the other is thinned to the same part, so that all of the data weigh the same.
        (`stochbn.distributed.fit` merges before that, and keeps what one process would.)

        Args:
            other: The other fit.
            num_kept: How many mini-batches are kept at most, as in `fit`. By default all that there are.
        """
        most = None if num_kept is None else check_whole("num_kept", num_kept, 1)
        joined = super().merge(other)
        part = min(len(stats.observations) / stats.num_batches for stats in (self, other))
        kept = [_spread_evenly(stats.observations, max(1, round(part * stats.num_batches))) for stats in (self, other)]
        collected = Thinned(most or sum(map(len, kept)))
        collected.add(torch.cat(kept))
        return replace(joined, observations=collected.distribution(joined).observations)
