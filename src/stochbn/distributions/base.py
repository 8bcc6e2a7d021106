"""Statistics → a distribution over a model's BatchNorm buffers → draws: what all families have in common.

Every family has the moments of each layer's statistics, which make the paper's r(μ) and r(σ) of eq. 4. They differ in
the joint distribution of all channels and layers around them: `factorized`, `lowrank`, `empirical`.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import LogNormal, Normal

from stochbn.distributions.draws import Draws
from stochbn.distributions.seeds import random_seed
from stochbn.distributions.tuning import Tuning
from stochbn.statistics.calls import unwrap
from stochbn.statistics.checks import check_whole, listing
from stochbn.statistics.layers import all_batch_norms, buffer_names
from stochbn.statistics.moments import Moments

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Layer:
    """The fitted r(μ) and r(σ) of one BatchNorm layer, four numbers a channel.

    Attributes:
        eps: The layer's ε.
        moments: Of the observed batch means and log(σ² + ε), (2, C) in float64.
    """

    eps: float
    moments: Moments

    @property
    def r_mu(self) -> Normal:
        """r(μ) of eq. 4, batch shape (C,)."""
        return Normal(self.moments.mean[0], self.moments.variance[0].sqrt(), validate_args=False)

    @property
    def r_sigma(self) -> LogNormal:
        """r(σ) of eq. 4, with σ = sqrt(σ²(B) + ε), batch shape (C,)."""
        return LogNormal(self.moments.mean[1] / 2, self.moments.variance[1].sqrt() / 2, validate_args=False)

    @property
    def num_features(self) -> int:
        return self.moments.mean.shape[1]


class Collector(Protocol):
    """What a family sees of all layers at once, while `fit` makes its pass."""

    def start_at(self, index: int) -> None:
        """Says which of all mini-batches the first will be, where others are collected elsewhere."""

    def add(self, rows: Tensor) -> None:
        """Takes the statistics of some mini-batches, (G, 2, ΣC)."""

    def merge(self, other: "Self") -> None:
        """Takes over what another one has collected of the mini-batches that follow; that one is then of no use."""

    def distribution(self, moments: "Distribution") -> "Distribution":
        """Returns the family's distribution around the moments of another."""


@dataclass(frozen=True, eq=False)
class Distribution(ABC):
    """A distribution over a model's BatchNorm buffers; a draw from it is a network. What `fit` returns.

    Attributes:
        layers: `{layer name: Layer}`.
        batch_size: M of the mini-batches that it was fitted on.
        num_batches: How many there were.
        excluded: BatchNorm layers of the model that it leaves to their running statistics.
        dropout: Whether dropout was active, as it should then be in prediction.
        conditioned: Whether each input is counted into the mini-batch that normalises it, as eq. 2 has it: one of M;
            with a spread of k one of M / k², the mini-batch that such a spread stands for.
        tuning: What `stochbn.tune` chose, if it was called.
    """

    layers: Mapping[str, Layer]
    batch_size: int
    num_batches: int
    excluded: tuple[str, ...] = ()
    dropout: bool = False
    conditioned: bool = False
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        spread = self.tuning.spread if self.tuning else 1.0
        if spread is None:
            raise ValueError(
                "Expected a tuning with a spread, got that of a plain network. Pass it to predict in place of stats."
            )
        if isinstance(spread, Mapping) and spread.keys() != self.layers.keys():
            raise ValueError(
                f"Expected a spread for each of the layers {listing(self.layers)}, got {listing(spread)}. Tune again."
            )
        # Now, not when they are first asked for: within torch.export, say, they would be no numbers, and stay so.
        _ = self.centre, self.std, self._eps

    family: ClassVar[str]
    array: ClassVar[str | None] = None  # the field that holds what the family knows beyond the moments
    collector: ClassVar["type[Collector] | None"] = None  # of what that field holds; None if moments are all

    def __repr__(self) -> str:
        channels = sum(layer.num_features for layer in self.layers.values())
        parts = [f"{len(self.layers)} layers", f"{channels} channels"]
        parts += [f"batch_size={self.batch_size}", f"num_batches={self.num_batches}"]
        parts += ["conditioned"] if self.conditioned else []
        parts += ["tuned"] if self.tuning else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @abstractmethod
    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Draws deviations from the centre at spread 1: (count, 2, ΣC) in float64, means and log(σ² + ε)."""

    def sample(self, num_samples: int, *, spread: float = 1.0, seed: int | None = None, first: int = 0) -> Draws:
        """Draws networks: centre + spread · deviation; `running_var` = σ² − ε, not below 0.

        Args:
            num_samples: S ≥ 1.
            spread: Multiplies the deviations, on top of the tuned spread; 0 gives the centre, S times.
            seed: Draw i of a seed is always the same network. None takes a seed from torch's generator. Draws 2i and
                2i + 1 of a Gaussian family mirror each other (`seeds.antithetic_normal`); `draws[::2]` are
                independent.
            first: Index of the first draw, to draw them in parts.
        """
        num_samples = check_whole("num_samples", num_samples, 1)
        if not (math.isfinite(spread) and spread >= 0):
            raise ValueError(f"Expected a finite spread of at least 0, got {spread}. Pass 1 for the fitted one.")
        seed = random_seed() if seed is None else check_whole("seed", seed, -(2**63))
        first = check_whole("first", first, 0)
        tuning = self.tuning or Tuning()
        assert tuning.spread is not None
        tuned = tuning.spread if isinstance(tuning.spread, Mapping) else dict.fromkeys(self.layers, tuning.spread)
        each = {name: spread * tuned[name] for name in self.layers}
        spreads = torch.tensor(list(each.values()), dtype=torch.float64, device=self.centre.device)
        widths = spreads.repeat_interleave(torch.tensor(self.sizes, device=spreads.device))
        drawn = self.centre + widths * self.deviations(seed, first, num_samples)  # (S, 2, ΣC)
        means = drawn[:, 0].split(self.sizes, dim=1)
        variances = (drawn[:, 1].exp() - self._eps).clamp_min(0).split(self.sizes, dim=1)
        buffers = {}
        for name, mean, variance in zip(self.layers, means, variances, strict=True):
            mean_name, var_name = buffer_names(name)
            buffers[mean_name], buffers[var_name] = mean, variance
        shares = {name: drawn.new_full((num_samples,), self._share(k)) for name, k in each.items()}
        return Draws(
            buffers,
            self.excluded,
            {name: layer.eps for name, layer in self.layers.items()},
            shares if self.conditioned else {},
            tuning.temperature,
        )

    def untuned(self) -> "Self":
        """Returns the distribution as it was fitted, without what `stochbn.tune` chose. Changes nothing."""
        return replace(self, tuning=None)

    def merge(self, other: "Self") -> "Self":
        """Joins two fits of one model to parts of its data: the fit to the whole, to be tuned again. Changes nothing.

        Moments are merged by Chan's formula: to rounding, they are those of one fit to the mini-batches of both.
        """
        if self._setting() != other._setting():
            raise ValueError(
                "Expected two fits of one model with one family and batch size, got different families, layers, sizes, "
                f"ε, dropout or batch sizes ({self} and {other}). Fit both with the same model and options."
            )
        layers = {
            name: Layer(layer.eps, layer.moments.merge(other.layers[name].moments))
            for name, layer in self.layers.items()
        }
        return replace(self, layers=layers, num_batches=self.num_batches + other.num_batches, tuning=None)

    def _setting(self) -> tuple[object, ...]:
        """Returns what two fits must have in common to be joined; joint families have one order of the layers too."""
        layers = [(name, layer.num_features, layer.eps) for name, layer in self.layers.items()]
        return type(self), layers, self.batch_size, self.dropout, self.conditioned, set(self.excluded)

    @property
    def sizes(self) -> list[int]:
        """Channels of each layer."""
        return [layer.num_features for layer in self.layers.values()]

    @cached_property
    def centre(self) -> Tensor:
        """(2, ΣC) mean over the mini-batches of each channel's μ and log(σ² + ε), layer after layer."""
        return torch.cat([layer.moments.mean for layer in self.layers.values()], dim=1)

    @cached_property
    def std(self) -> Tensor:
        """(2, ΣC) their standard deviation."""
        return torch.cat([layer.moments.variance.sqrt() for layer in self.layers.values()], dim=1)

    @cached_property
    def _eps(self) -> Tensor:
        return torch.cat([torch.full_like(layer.moments.mean[0], layer.eps) for layer in self.layers.values()])

    def _share(self, spread: float) -> float:
        """Returns what part of its mini-batch an input is: one of M / k², which are two at least."""
        return min(spread * spread / self.batch_size, 0.5)  # ** would raise where the product is beyond floats

    def drift(self, model: nn.Module) -> dict[str, tuple[float, float]]:
        """Measures how far the fitted centre lies from the model's running statistics. Changes nothing.

        Returns:
            For each layer the median over channels of two numbers: the distance of the means in running standard
            deviations; and |log| of the ratio of the variances, as far as it exceeds three fitted standard
            deviations (the fitted centre is a mean of logarithms, which lies below the logarithm of the mean by an
            amount that grows with the spread). Near 0 when the data are the training data.
        """
        model = unwrap(model)
        self.sample(1, spread=0, seed=0).match(model)
        drifts = {}
        batch_norms = all_batch_norms(model)
        for name, layer in self.layers.items():
            own = batch_norms[name]
            assert own.running_mean is not None
            assert own.running_var is not None
            variance = own.running_var.detach().cpu().double() + layer.eps
            centre, std = layer.moments.mean.cpu(), layer.moments.variance.cpu().sqrt()
            shift = (centre[0] - own.running_mean.detach().cpu().double()).abs() / variance.sqrt()
            ratio = ((centre[1] - variance.log()).abs() - 3 * std[1]).clamp_min(0)
            drifts[name] = (shift.median().item(), ratio.median().item())
        return drifts

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, whole or not at all; `stochbn.load` reads it back exactly."""
        from stochbn.distributions import files  # it knows every family, and so stands below them

        files.save(self, path)


def common_fields(stats: Distribution) -> dict[str, Any]:
    """Returns what every family has, to make one of another family."""
    return {field.name: getattr(stats, field.name) for field in fields(Distribution)}
