"""Observations of every layer → moments, and what a joint family keeps of them, mini-batch after mini-batch."""

import itertools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stochbn.distributions.base import Collector, Layer
from stochbn.distributions.factorized import Factorized
from stochbn.statistics.checks import listing
from stochbn.statistics.layers import all_batch_norms
from stochbn.statistics.moments import Moments


class Collected:
    """Moments of each layer's observations so far.

    Args:
        momentum: Makes the moments exponential.
        joint: Is shown the observations of all layers at once.
        order: In which they are shown to it.
    """

    def __init__(
        self, momentum: float | None = None, joint: Collector | None = None, order: Iterable[str] = ()
    ) -> None:
        self.momentum = momentum
        self.joint = joint
        self.order = self.chosen = tuple(order)
        self.moments: dict[str, Moments] = {}
        self.batch_size = 0
        self.num_batches = 0

    def add(self, observed: dict[str, Tensor], counts: list[int]) -> None:
        """Takes what each layer saw in some forward passes of so many mini-batches: (calls · Σ counts, 2, C)."""
        for name, seen in observed.items():
            values = seen.detach().cpu().double()
            if not values.isfinite().all():
                row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
                calls = len(values) // sum(counts)
                order = [number for start, size in _spans(counts) for number in [*range(start, start + size)] * calls]
                if len(order) == len(values):
                    where = f"at mini-batch {self.num_batches + order[row]}"
                else:  # a layer that not every pass uses
                    where = f"after mini-batch {self.num_batches}"
                raise ValueError(
                    f"Expected finite statistics, got NaN or Inf in layer {name!r} {where}. "
                    "Check the data there, and the weights before that layer."
                )
            new = Moments.of(values)
            old = self.moments.get(name)
            if self.momentum is not None:
                new = new.scale(self.momentum)
                old = old and old.scale(1 - self.momentum)
            self.moments[name] = old.merge(new) if old else new
        if self.joint is not None:
            known = self.order if self.num_batches else observed
            uneven = [
                n for n in {**self.moments, **observed} if n not in known or len(observed.get(n, ())) != sum(counts)
            ]
            if uneven:
                raise ValueError(
                    "Expected every layer to be used once in each forward pass for a joint family, got "
                    f"{listing(uneven)}. Fit family='factorized', or leave these layers out with layers=."
                )
            self.order = tuple(name for name in self.order if name in observed)
            self.joint.add(torch.cat([observed[name].detach().cpu().double() for name in self.order], dim=2))
        self.num_batches += sum(counts)

    def merge(self, other: "Collected") -> "Collected":
        """Takes over what was collected of the mini-batches that follow, and returns the whole.

        Nothing has been cut down to a family's size yet, so the result is that of one pass over all of them: to
        rounding for moments, to the bit for mini-batches that `Thinned` keeps, and for factors as far as two sketches
        follow directions like one: exactly while their rows hold all mini-batches.
        """
        if not other.num_batches:
            return self
        if not self.num_batches:
            return other
        for name, new in other.moments.items():
            self.moments[name] = self.moments[name].merge(new) if name in self.moments else new
        if self.joint is not None and other.joint is not None:
            self.joint.merge(other.joint)
        self.num_batches += other.num_batches
        return self

    def only_moments(self) -> "Collected":
        """Returns a copy without what a joint family keeps."""
        copied = Collected(self.momentum, order=self.chosen)
        copied.moments, copied.batch_size, copied.num_batches = dict(self.moments), self.batch_size, self.num_batches
        return copied

    def agreement(self) -> dict[str, Any]:
        """Returns what parts must have in common to be merged; None where nothing was collected."""
        mine = {"batch_size": self.batch_size, "layers": self.chosen}
        if self.joint is not None:
            mine["order of layers"] = self.order
        return mine if self.num_batches else dict.fromkeys(mine)

    def standard_error(self, layers: Iterable[str]) -> float:
        """Returns the largest of any channel's centre, of μ in units of σ or of log(σ² + ε); ∞ before all are known."""
        worst = 0.0
        for name in layers:
            moments = self.moments.get(name)
            if moments is None or moments.weight_sq >= moments.weight**2:
                return math.inf
            effective = moments.weight**2 / moments.weight_sq
            errors = (moments.variance / effective).sqrt()  # (2, C)
            errors[0] /= (moments.mean[1] / 2).exp()
            worst = max(worst, float(errors.max()))
        return worst

    def distribution(
        self, model: nn.Module, layers: dict[str, _BatchNorm], *, dropout: bool, conditioned: bool = False
    ) -> Factorized:
        """Returns what was collected for these layers; warns of those that were hardly used."""
        # The order of the model, not of the calls: draws follow it, and it survives a change of the forward pass.
        fitted = {
            name: Layer(layer.eps, self.moments[name])
            for name, layer in layers.items()
            if name in self.moments and self.moments[name].weight_sq < self.moments[name].weight ** 2  # seen twice
        }
        if not fitted:
            raise ValueError(
                f"Expected a forward pass that uses BatchNorm layers, got one that uses none of {listing(layers)}. "
                "Check that call= runs the whole model, and that no part of it is compiled."
            )
        if len(fitted) < len(layers):
            warnings.warn(
                f"The BatchNorm layers {listing(name for name in layers if name not in fitted)} were used in fewer "
                "than 2 mini-batches; they keep to their running statistics.",
                stacklevel=3,
            )
        excluded = tuple(name for name in all_batch_norms(model) if name not in fitted)
        return Factorized(fitted, self.batch_size, self.num_batches, excluded, dropout, conditioned)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    """Returns where each of successive parts starts, and its size."""
    return list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))
