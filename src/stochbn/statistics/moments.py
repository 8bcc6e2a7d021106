"""Observations → mean and variance, in one stream or in parts that are merged."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and squared deviations of weighted observations, streaming: Welford's update, merged by Chan's formula.

    Attributes:
        weight: Σw; the number of observations when each counts once.
        weight_sq: Σw².
        mean: (*) weighted mean.
        deviation: (*) Σw (x − mean)².
    """

    weight: float
    weight_sq: float
    mean: Tensor
    deviation: Tensor

    @staticmethod
    def of(observations: Tensor) -> "Moments":
        """Takes (G, *) observations, each with weight 1."""
        mean, count = observations.mean(0), float(observations.shape[0])
        # torch.var_mean takes ten times as long over a leading axis.
        return Moments(count, count, mean, (observations - mean).square_().sum(0))

    def merge(self, other: "Moments") -> "Moments":
        """Joins two sets of observations."""
        weight = self.weight + other.weight
        delta = other.mean - self.mean
        return Moments(
            weight,
            self.weight_sq + other.weight_sq,
            self.mean + delta * (other.weight / weight),
            self.deviation + other.deviation + delta.square() * (self.weight * other.weight / weight),
        )

    def scale(self, factor: float) -> "Moments":
        """Multiplies every weight, which leaves mean and variance as they are."""
        return Moments(self.weight * factor, self.weight_sq * factor**2, self.mean, self.deviation * factor)

    @property
    def variance(self) -> Tensor:
        """(*) unbiased: divided by Σw − Σw²/Σw, which is n − 1 for unit weights."""
        return self.deviation / (self.weight - self.weight_sq / self.weight)
