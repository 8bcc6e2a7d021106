"""Data → distribution, in one pass over a loader."""

import itertools
import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.auto import tqdm

from stochbn.distributions.base import Factorized, Fitted, Layer
from stochbn.distributions.families import FAMILIES, Joint
from stochbn.statistics.batches import (
    STACKED_EXAMPLES,
    Call,
    Called,
    call_on_item,
    check_whole,
    copy_to,
    device_of,
    length,
    listing,
    mini_batches,
    rows,
)
from stochbn.statistics.moments import Moments
from stochbn.statistics.normalization import (
    BatchNormalization,
    Layers,
    all_batch_norms,
    channels_last_weights,
    dropout_layers,
    evaluating,
    find_layers,
    preserving_rng,
    unwrap,
)

# A layer has drifted when half of its channels are this far from the running statistics: one standard deviation, or a
# factor of 4 in variance. That leaves room for dropout, which raises variances in training and which fitting may leave
# off: p = 0.5 doubles the second moment of what it passes on.
MAX_SHIFT = 1.0
MAX_LOG_RATIO = 1.386
# Observations are added up, and standard errors computed, after so many forward passes.
TOGETHER = 10


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    batch_size: int | None = None,
    num_batches: int | None = None,
    tolerance: float | None = None,
    dropout: bool = False,
    layers: Layers = None,
    call: Call | None = None,
    family: Literal["factorized", "lowrank", "empirical"] = "factorized",
    size: int | None = None,
    conditioned: bool = False,
    progress: bool = True,
) -> Fitted:
    """Fits r(μ) r(σ) to the batch statistics of training data in one pass. The model is left as it was.

    Minimises KL( (1/N) Σ p(μ, σ | x_i) ‖ r(μ) r(σ) ) (below eq. 4), which is to match moments: mean and unbiased
    variance of each channel's batch mean, and of its log(σ² + ε), over the mini-batches.

    Args:
        model: Any trained network with BatchNorm layers, in any mode.
        loader: Shuffled training data, preprocessed as in training: a DataLoader or any iterable of batches.
        batch_size: M, the size of the mini-batches that the model was trained with. By default the loader's. A loader
            of larger batches is faster and gives the same: each is cut into mini-batches that are normalised apart.
        num_batches: Use only that many mini-batches.
        tolerance: Stop when no channel's centre has a standard error above this: of μ in units of the channel's σ, and
            of log σ² (0.01, say). The fitted spreads are then as certain. By default the whole loader is used.
        dropout: Keep dropout layers active, for `predict(…, dropout=True)`.
        layers: The BatchNorm layers to treat: names or patterns, or a predicate of name and module. The others
            keep to their running statistics, here and in prediction.
        call: How the model is called on what the loader yields, `call(model, batch)`. By default a tensor, or the first
            of a tuple or list such as `(x, y)`, is the model's argument, and a mapping holds its keywords.
        family: The distribution around these moments. The paper's "factorized" has independent channels. "lowrank" adds
            common factors of all layers, "empirical" keeps statistics of real mini-batches.
        size: Of "lowrank", how many factors (10); of "empirical", how many mini-batches at most (256).
        conditioned: In prediction, count each input as one of the M that normalise it.
        progress: Show a progress bar.

    Returns:
        The distribution, to sample from, to `save` and to `predict` with.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        >>> loader = [(torch.rand(32, 1, 8, 8), torch.zeros(32)) for _ in range(5)]
        >>> for x, _ in loader:
        ...     _ = model(x)
        >>> fit(model, loader, batch_size=16, progress=False)
        Factorized(1 layers, 4 channels, batch_size=16, num_batches=10)
    """
    if family not in FAMILIES:
        raise ValueError(f"Expected family to be one of {', '.join(map(repr, FAMILIES))}, got {family!r}.")
    for name, value, least in (("batch_size", batch_size, 2), ("num_batches", num_batches, 2), ("size", size, 1)):
        if value is not None:
            check_whole(name, value, least)
    collector = FAMILIES[family][1]
    if size is not None and collector is None:
        raise ValueError(
            f"Expected size= with the families 'lowrank' and 'empirical', got it with {family!r}. Leave it out."
        )
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"Expected a tolerance above 0, got {tolerance}. Pass 0.01, say, or leave it out.")
    model = unwrap(model)
    chosen = find_layers(model, layers)
    if dropout:
        dropout_layers(model)
    joint: Joint | None = None
    if collector is not None:
        joint = collector() if size is None else collector(size)
    collected = Collected(joint=joint, order=chosen)
    with (
        torch.no_grad(),
        preserving_rng(device_of(model)),
        evaluating(model, dropout=dropout),
        BatchNormalization(chosen) as normalization,
        tqdm(total=length(loader), desc="fit", unit="batch", disable=not progress, leave=False) as bar,
    ):
        parts = mini_batches(loader, batch_size=batch_size, num_batches=num_batches)
        run = _Pass(model, call or call_on_item, normalization)
        pending: list[int] = []
        for item, groups, each in parts:
            collected.batch_size = each
            together = max(1, STACKED_EXAMPLES // each)
            for start in range(0, groups, together):
                some = min(together, groups - start)
                run(item if some == groups else rows(item, start * each, (start + some) * each), some)
                pending.append(some)
            bar.update()
            if len(pending) < TOGETHER:
                continue
            collected.add(normalization.take(), pending)
            pending = []
            if progress or tolerance:
                error = collected.standard_error(chosen)
                bar.set_postfix(standard_error=f"{error:.4f}", refresh=False)
                if tolerance is not None and error <= tolerance:
                    break
        if pending:
            collected.add(normalization.take(), pending)
    if collected.num_batches < 2:
        raise ValueError(
            f"Expected at least 2 mini-batches to fit, got {collected.num_batches}. "
            "Pass a longer loader or a smaller batch_size=."
        )
    factorized = collected.distribution(model, chosen, dropout=dropout)
    stats = factorized if joint is None else joint.distribution(factorized)
    _warn_of_drift(stats, model)
    return replace(stats, conditioned=conditioned)


class _Pass:
    """Runs the model for its statistics, with convolutions channels-last as long as the model bears it."""

    def __init__(self, model: nn.Module, call: Call, normalization: BatchNormalization) -> None:
        self.called = Called(model, call)
        self.normalization = normalization
        self.weights = channels_last_weights(self.called)

    def __call__(self, item: Any, groups: int) -> None:
        self.normalization.groups = groups
        if self.weights:
            self.normalization.reordered = True
            try:
                with self.normalization.undoing():
                    functional_call(
                        self.called, self.weights, (copy_to(item, device_of(self.called)),), tie_weights=False
                    )
                return
            except Exception:  # whatever it is, the pass below runs the model as its author meant it
                self.weights = {}
                self.normalization.reordered = False
        self.called(copy_to(item, device_of(self.called)))


class Collected:
    """Moments of each layer's observations so far.

    Args:
        momentum: Makes the moments exponential.
        joint: Is shown the observations of all layers at once.
        order: In which they are shown to it.
    """

    def __init__(self, momentum: float | None = None, joint: Joint | None = None, order: Iterable[str] = ()) -> None:
        self.momentum = momentum
        self.joint = joint
        self.order = tuple(order)
        self.moments: dict[str, Moments] = {}
        self.batch_size = 0
        self.num_batches = 0

    def add(self, observed: dict[str, Tensor], groups: list[int]) -> None:
        """Takes what each layer saw in some forward passes of so many mini-batches: (calls · Σ groups, 2, C)."""
        for name, seen in observed.items():
            values = seen.detach().cpu().double()
            if not values.isfinite().all():
                row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
                calls = len(values) // sum(groups)
                order = [number for start, size in _spans(groups) for number in [*range(start, start + size)] * calls]
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
                n for n in {**self.moments, **observed} if n not in known or len(observed.get(n, ())) != sum(groups)
            ]
            if uneven:
                raise ValueError(
                    "Expected every layer to be used once in each forward pass for a joint family, got "
                    f"{listing(uneven)}. Fit family='factorized', or leave these layers out with layers=."
                )
            self.order = tuple(name for name in self.order if name in observed)
            self.joint.add(torch.cat([observed[name].detach().cpu().double() for name in self.order], dim=2))
        self.num_batches += sum(groups)

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

    def distribution(self, model: nn.Module, layers: dict[str, _BatchNorm], *, dropout: bool) -> Factorized:
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
        return Factorized(fitted, self.batch_size, self.num_batches, excluded, dropout)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    """Returns where each of successive parts starts, and its size."""
    return list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))


def _warn_of_drift(stats: Fitted, model: nn.Module) -> None:
    drifts = stats.drift(model)
    name, (shift, ratio) = max(drifts.items(), key=lambda d: max(d[1][0] / MAX_SHIFT, d[1][1] / MAX_LOG_RATIO))
    if shift > MAX_SHIFT or ratio > MAX_LOG_RATIO:
        warnings.warn(
            f"The loader does not look like the training data: in layer {name!r} the typical channel's mean is "
            f"{shift:.2f} standard deviations from the model's running mean, and its variance differs by a factor of "
            f"{torch.tensor(ratio).exp():.2f}. Check the preprocessing, or whether the model is trained; "
            "stats.drift(model) lists all layers.",
            stacklevel=3,
        )
