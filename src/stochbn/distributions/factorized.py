"""The paper's family, eq. 4: r(μ) = N(m_μ, s²_μ) and r(σ) = LogN(m_σ, s²_σ), each channel by itself."""

from dataclasses import dataclass, replace

from torch import Tensor

from stochbn.distributions.base import Distribution, Layer
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
    """

    family = "factorized"

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Draws independent Gaussian deviations."""
        noise = antithetic_normal(seed, first, count, self.std.numel())
        return self.std * noise.view(-1, *self.std.shape).to(self.std.device)

    def merge(self, other: "Factorized") -> "Factorized":
        """Joins two fits of one model to parts of its data: the fit to the whole, to rounding; to be tuned again."""
        if self._setting() != other._setting():
            raise ValueError(
                "Expected two fits of one model with one batch size, got different layers, sizes, ε, dropout or batch "
                f"sizes ({self} and {other}). Fit both with the same model and options."
            )
        layers = {
            name: Layer(layer.eps, layer.moments.merge(other.layers[name].moments))
            for name, layer in self.layers.items()
        }
        return replace(self, layers=layers, num_batches=self.num_batches + other.num_batches, tuning=None)

    def _setting(self) -> tuple[object, ...]:
        """Returns what two fits must have in common to be joined."""
        layers = {name: (layer.num_features, layer.eps) for name, layer in self.layers.items()}
        return layers, self.batch_size, self.dropout, self.conditioned, set(self.excluded)
