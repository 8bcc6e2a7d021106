"""Held-out data → how wide the distribution is to be, and a temperature: one pass, by the NLL.

The spread that mini-batches had in training need not be the one that predicts best. All spreads are tried on the same
draws (common random numbers), so their losses differ by what the spread does and not by chance. A parabola through the
best and its neighbours, over the logarithm, gives the minimum between them.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from stochbn.distributions.base import Distribution, Tuning
from stochbn.distributions.draws import join_draws
from stochbn.distributions.seeds import member_seed, random_seed
from stochbn.inference.engine.network import Network
from stochbn.inference.engine.sampling import warn_of_dropout
from stochbn.inference.prediction import check_logits
from stochbn.statistics.calls import Call, call_on_item, unwrap
from stochbn.statistics.checks import check_whole
from stochbn.statistics.items import describe
from stochbn.statistics.mini_batches import check_loader, length
from stochbn.statistics.normalization import widen
from stochbn.statistics.progress import progress_bar
from stochbn.statistics.restoring import KeepingModes
from stochbn.uncertainty import class_indices

SPREADS = tuple(2 ** (step / 2) for step in range(-2, 5))  # 0.5, 0.71, 1, …, 4
NARROWER = tuple(2 ** (step / 2) for step in range(-6, -2))  # 0.13, …, 0.35, tried if 0.5 is best
WIDER = tuple(2 ** (step / 2) for step in range(5, 9))  # 5.7, …, 16, tried if 4 is best
AROUND = tuple(2 ** (step / 2) for step in range(-2, 3))  # for one group of layers, times what all have
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-8, 13))  # 0.25, …, 1, …, 8

_TARGET = "Pass target=, for example target=lambda batch: batch['labels']."

Spread = float | Mapping[str, float]
T = TypeVar("T", bound=Distribution | Sequence[Distribution])


def tune(
    model: nn.Module | Sequence[nn.Module],
    stats: T,
    loader: Iterable[Any],
    *,
    choose: Literal["spread", "temperature", "both"] = "spread",
    num_groups: int = 1,
    num_samples: int = 8,
    seed: int | None = 0,
    dropout: bool = False,
    call: Call | None = None,
    target: Callable[[Any], Tensor] | None = None,
    progress: bool = True,
) -> T:
    """Chooses the spread, and a temperature if asked, that predict held-out labels best. No model is changed.

    A spread of k multiplies every deviation from the centre by k. The variances of batch statistics fall with the size
    of the batch, so it stands for mini-batches k² times smaller than those of training. The cost is that of 56 passes
    over the data by default: 8 draws for each of 7 spreads.

    Args:
        model: A trained classifier, or several, which are then tuned together, to one spread and temperature.
        stats: What `fit` returned for it; for several a sequence.
        loader: Held-out data with labels, seen neither in training nor in the test: batches `(x, y)`.
        choose: What to choose: the spread; a temperature, which divides every draw's outputs before the softmax, at the
            fitted spread; or both. The NLL of held-out data cannot see what a narrower spread costs on out-of-domain
            inputs.
        num_groups: Into how many groups of successive layers the network is cut, each with a spread of its own; as many
            as there are layers for one each. They are chosen one after the other, in one more pass each.
        num_samples: Draws for each spread that is tried. The losses fall with more, the best spread hardly changes.
        seed: Of the draws, as in `predict`.
        dropout: As in `predict`.
        call: As in `predict`.
        target: Returns the labels of a batch; by default they are the second of a tuple or list.
        progress: Show a progress bar.

    Returns:
        The distribution, or the list of them, with `tuning` set, which `predict` follows and `save` includes.

    Examples:
        >>> import stochbn
        >>> _ = torch.manual_seed(2)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> batches = [(torch.randn(16, 2), torch.randint(3, (16,))) for _ in range(20)]
        >>> for x, _ in batches:
        ...     _ = model(x)
        >>> stats = stochbn.fit(model, batches[:10], progress=False)
        >>> tuned = stochbn.tune(model, stats, batches[10:], choose="both", progress=False)
        >>> tuned
        Factorized(1 layers, 8 channels, batch_size=16, num_batches=10, tuned)
        >>> len(tuned.tuning.curve) >= 7
        True
    """
    models = [unwrap(one) for one in model] if isinstance(model, (Sequence, nn.ModuleList)) else [unwrap(model)]
    members: list[Distribution] = list(stats) if isinstance(stats, Sequence) else [stats]
    for member in members:
        if not isinstance(member, Distribution):
            raise TypeError(
                f"Expected what stochbn.fit returned, got {type(member).__name__}. The order is "
                "tune(model, stats, val_loader)."
            )
        warn_of_dropout(member, dropout, stacklevel=3)
    if not models or len(members) != len(models):
        raise ValueError(
            f"Expected models and a distribution for each, got {len(models)} and {len(members)}. Fit each model on its "
            "own: [stochbn.fit(model, loader) for model in models]."
        )
    seed = random_seed() if seed is None else check_whole("seed", seed, -(2**63))
    check_loader(loader)
    num_groups, num_samples = check_whole("num_groups", num_groups, 1), check_whole("num_samples", num_samples, 2)
    names = list(members[0].layers)
    if choose not in ("spread", "temperature", "both"):
        raise ValueError(f"Expected choose to be 'spread', 'temperature' or 'both', got {choose!r}.")
    if choose == "temperature" and num_groups > 1:
        raise ValueError(
            f"Expected no groups of layers for a temperature alone, got num_groups={num_groups}. Pass choose='both', "
            "or leave num_groups out: groups are for spreads."
        )
    if num_groups > 1 and (num_groups > len(names) or any(list(member.layers) != names for member in members)):
        raise ValueError(
            f"Expected at most as many groups as layers, and the same layers in all models, got num_groups="
            f"{num_groups} for {len(names)} layers. Pass fewer."
        )
    held_out = _HeldOut(
        models,
        members,
        list(loader) if isinstance(loader, Iterator) else loader,  # it may be read more than once
        call or call_on_item,
        target or _second,
        num_samples=num_samples,
        seed=seed,
        dropout=dropout,
        temperatures=(1.0,) if choose == "spread" else TEMPERATURES,
        progress=progress,
    )
    curve = _search(held_out) if choose != "temperature" else held_out.try_spreads((1.0,), "tune")
    best, found = _best(curve)
    _warn_of_ends(best)
    chosen: Spread = best
    bounds = [round(number * len(names) / num_groups) for number in range(num_groups + 1)] if num_groups > 1 else []
    for start, stop in itertools.pairwise(bounds):
        before = chosen if isinstance(chosen, Mapping) else dict.fromkeys(names, chosen)
        tried = [{**before, **{name: before[name] * k for name in names[start:stop]}} for k in AROUND]
        points = held_out.try_spreads(tried, f"tune {names[start] or 'layer'}")
        factor, found = _best([(k, *point[1:]) for k, point in zip(AROUND, points, strict=True)])
        chosen = {**before, **{name: before[name] * factor for name in names[start:stop]}}
    tuned = [replace(member, tuning=Tuning(chosen, found, tuple(curve))) for member in members]
    return cast(T, tuned if isinstance(stats, Sequence) else tuned[0])


def _search(held_out: "_HeldOut") -> list[tuple[float, float, float]]:
    """Tries spreads around the fitted one, and further out on the side where the best of them lies at the end."""
    curve = held_out.try_spreads(SPREADS, "tune")
    if _best(curve)[0] == SPREADS[0]:
        return held_out.try_spreads(NARROWER, "tune, narrower") + curve
    if _best(curve)[0] == SPREADS[-1]:
        return curve + held_out.try_spreads(WIDER, "tune, wider")
    return curve


def _warn_of_ends(best: float) -> None:
    if best == NARROWER[0]:
        warnings.warn(
            f"The NLL is lowest at {best:g}, the smallest spread tried: on these data draws do not improve it. The "
            "fitted spread may still expose out-of-domain inputs; tuning.curve has the NLL that it costs.",
            stacklevel=3,
        )
    elif best == WIDER[-1]:
        warnings.warn(
            f"The NLL is lowest at {best:g}, the largest spread tried: draws far wider than mini-batches ever were. "
            "Check that the labels are those of the inputs.",
            stacklevel=3,
        )


@dataclass(frozen=True)
class _HeldOut:
    """The data to tune on, and how models are to be run on them."""

    models: list[nn.Module]
    members: list[Distribution]
    loader: Iterable[Any]
    call: Call
    target: Callable[[Any], Tensor]
    num_samples: int
    seed: int
    dropout: bool
    temperatures: tuple[float, ...]
    progress: bool

    def try_spreads(self, spreads: Sequence[Any], title: str) -> list[tuple[Any, float, float]]:
        """Returns each spread with its best temperature and the NLL there, from one pass over the data."""
        networks = [self._network(number, spreads) for number in range(len(self.models))]
        total, count = torch.zeros(len(spreads), len(self.temperatures), dtype=torch.float64, device="cpu"), 0
        with (
            KeepingModes(),
            torch.no_grad(),
            progress_bar(title, "batch", length(self.loader), shown=self.progress) as bar,
        ):
            for item in self.loader:
                labels = self._labels(item).to(networks[0].device)
                for row in range(len(spreads)):
                    total[row] += self._losses(networks, item, labels, row)
                count += labels.numel()
                bar.update()
        if not count:
            raise ValueError(
                "Expected at least one batch of held-out data, got an empty loader, or one that can be read only once. "
                "Pass a DataLoader or a list."
            )
        return [
            (spread, *find_minimum(list(zip(self.temperatures, row.tolist(), strict=True))))
            for spread, row in zip(spreads, total / count, strict=True)
        ]

    def _network(self, number: int, spreads: Sequence[Spread]) -> Network:
        """Returns one of the models with the draws of all spreads, one after the other."""
        member, seed = self.members[number], member_seed(self.seed, number)
        draws = join_draws(
            [replace(member, tuning=Tuning(spread)).sample(self.num_samples, seed=seed) for spread in spreads]
        )
        return Network(
            self.models[number],
            self.call,
            draws,
            num_samples=len(draws),
            seed=seed,
            dropout=self.dropout,
            num_masks=self.num_samples,
            num_batches=(length(self.loader) or 0) * len(spreads) or None,
        )

    def _labels(self, item: Any) -> Tensor:
        labels = self.target(item)
        if not isinstance(labels, Tensor):
            raise TypeError(f"Expected labels as a tensor, got {describe(labels)}. {_TARGET}")
        return labels

    def _losses(self, networks: list[Network], item: Any, labels: Tensor, row: int) -> Tensor:
        """Returns the sum over a batch of −log of the mean p(y | x) over the draws of one spread, by temperature."""
        mean = torch.zeros(len(self.temperatures), *labels.shape, device=labels.device)  # of p(y | x)
        for network in networks:
            for outputs in network.run(item, None, row * self.num_samples, (row + 1) * self.num_samples):
                outputs = widen(outputs)  # (s, N, K, *)
                self._check(outputs, row)
                index = class_indices(outputs[0], labels).expand(len(outputs), *[-1] * (outputs.dim() - 1))
                for column, temperature in enumerate(self.temperatures):
                    probs = (outputs / temperature).softmax(2).gather(2, index).squeeze(2)
                    mean[column] += probs.sum(0)
        mean /= len(networks) * self.num_samples
        return -mean.clamp_min_(torch.finfo(mean.dtype).tiny).log_().flatten(1).sum(1, dtype=torch.float64).cpu()

    def _check(self, outputs: Tensor, row: int) -> None:
        if outputs.dim() < 3 or outputs.shape[2] < 2:
            raise ValueError(
                f"Expected a classifier that returns (N, K, …) with K ≥ 2 classes, got {list(outputs.shape[1:])}. "
                "Labels with a sigmoid each, and regression, cannot be tuned."
            )
        check_logits(outputs)
        if not outputs.isfinite().all():
            if row == 0:
                raise ValueError(
                    "Expected finite outputs, got NaN or Inf at the smallest spread. Check the held-out data, and the "
                    "model's own output on them."
                )
            outputs.nan_to_num_(0.0, 0.0, 0.0)  # overflow of a spread too wide: as good as no answer


def _second(item: Any) -> Any:
    if isinstance(item, (tuple, list)) and len(item) > 1:
        return item[1]
    raise TypeError(f"Expected batches (x, y) with labels, got {describe(item)}. {_TARGET}")


def _best(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the best spread, and the temperature between those that its neighbours had."""
    spread, _ = find_minimum([(k, loss) for k, _, loss in points])
    for (k0, t0, _), (k1, t1, _) in itertools.pairwise(points):
        if spread <= k1:
            weight = math.log(spread / k0) / math.log(k1 / k0)
            return spread, t0 * (t1 / t0) ** weight
    return spread, points[-1][1]


def find_minimum(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Finds where a curve through points (x, y) is lowest: a parabola over log x through the lowest and its neighbours.

    Examples:
        >>> x, y = find_minimum([(2**k, (k - 0.8) ** 2) for k in range(-2, 4)])
        >>> round(math.log2(x), 6), round(y, 6)
        (0.8, 0.0)
    """
    place = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < place < len(points) - 1:
        return points[place]
    (x0, y0), (x1, y1), (_, y2) = points[place - 1 : place + 2]
    step = math.log(x1 / x0)  # the third lies as far on the other side
    curvature, slope = (y0 - 2 * y1 + y2), (y2 - y0) / 2
    if curvature <= 0:
        return x1, y1
    shift = -slope / curvature
    return x1 * math.exp(shift * step), y1 + slope * shift + curvature * shift**2 / 2
