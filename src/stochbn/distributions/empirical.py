"""Statistics of real mini-batches, kept as they are: what the factorised r(μ) r(σ) throws away, their correlations.

One mini-batch gives every channel of every layer its statistics at once. Some of these observations are kept, in the
pass that `fit` makes anyway.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stochbn.distributions.base import Distribution, common_fields
from stochbn.distributions.seeds import derive_seed


class Thinned:
    """Keeps at most `num_kept` rows of a stream, spread evenly over it, for `Empirical`."""

    def __init__(self, num_kept: int = 256) -> None:
        self._num_kept = num_kept
        self._stride = 1
        self._seen = 0
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self._rows += rows[-self._seen % self._stride :: self._stride].float()
        self._seen += len(rows)
        while len(self._rows) >= 2 * self._num_kept:
            self._rows = self._rows[::2]
            self._stride *= 2

    def distribution(self, moments: Distribution) -> "Empirical":
        count = min(self._num_kept, len(self._rows))
        places = torch.linspace(0, len(self._rows) - 1, count, dtype=torch.float64, device="cpu").round().long()
        return Empirical(**common_fields(moments), observations=torch.stack([self._rows[i] for i in places.tolist()]))


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
