"""The paper's family, eq. 4: r(μ) = N(m_μ, s²_μ) and r(σ) = LogN(m_σ, s²_σ), each channel by itself."""

from dataclasses import dataclass

from torch import Tensor

from stochbn.distributions.base import Distribution
from stochbn.distributions.seeds import antithetic_normal


@dataclass(frozen=True, eq=False, repr=False)
class Factorized(Distribution):
    """The paper's r(μ) r(σ) (eq. 4): independent Normal means and Log-normal deviations, by matched moments.

    Examples:
        >>> import stochbn, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, progress=False)
        >>> stats
        Factorized(1 layers, 3 channels, batch_size=16, num_batches=10)
        >>> stats.layers["1"].r_mu.loc.shape
        torch.Size([3])
        >>> stats.sample(50, seed=0).buffers["1.running_var"].shape
        torch.Size([50, 3])
        >>> stats.merge(stochbn.fit(model, batches[::-1], progress=False))
        Factorized(1 layers, 3 channels, batch_size=16, num_batches=20)
    """

    family = "factorized"

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Draws independent Gaussian deviations."""
        noise = antithetic_normal(seed, first, count, self.std.numel())
        return self.std * noise.view(-1, *self.std.shape).to(self.std.device)
