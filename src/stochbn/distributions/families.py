"""Joint families: what the factorised r(μ) r(σ) throws away, the correlations between channels and layers.

One mini-batch gives every channel of every layer its statistics at once. `Empirical` keeps some of these observations
as they are; `LowRank` keeps their most important directions. Both are collected in the pass that `fit` makes anyway.
"""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from stochbn.distributions import files as storage
from stochbn.distributions.base import Factorized, Fitted, Layer, Tuning
from stochbn.distributions.seeds import antithetic_normal, derive_seed
from stochbn.statistics.moments import Moments


@dataclass(frozen=True, eq=False, repr=False)
class Empirical(Fitted):
    """Statistics of real mini-batches, joint over channels and layers: what exact inference samples, without a batch.

    At spread 1 a draw *is* one of the mini-batches that were kept. Each comes once before any comes again.

    Attributes:
        observations: (B, 2, ΣC) μ and log(σ² + ε) of B mini-batches, spread evenly over those of the fit.

    Example:
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

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Takes mini-batches in a random order, which is another one in each round through all of them."""
        size = len(self.observations)
        rounds = range(first // size, (first + count - 1) // size + 1)
        orders = [
            torch.randperm(size, generator=torch.Generator("cpu").manual_seed(derive_seed(seed, "order", number)))
            for number in rounds
        ]
        index = torch.cat(orders)[first % size :][:count]
        return self.observations[index.to(self.observations.device)].double() - self.centre


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Fitted):
    """A Gaussian over all layers at once: a few common factors, and for each channel what they leave unexplained.

    Every channel has the mean and variance of the factorised family. Factors are the principal directions of the
    observed statistics, in units of what they do to normalised activations.

    Attributes:
        factors: (R, 2, ΣC), what a standard Normal number moves μ and log(σ² + ε) by; the strongest first.

    Example:
        >>> import stochbn
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, family="lowrank", size=2, progress=False)
        >>> stats.factors.shape
        torch.Size([2, 2, 3])
    """

    factors: Tensor = field(kw_only=True)

    family = "lowrank"
    array = "factors"

    def deviations(self, seed: int, first: int, count: int) -> Tensor:
        """Draws common factors and independent remainders."""
        factors = self.factors.double()
        remainder = (self.std.square() - factors.square().sum(0)).clamp_min(0).sqrt()
        noise = antithetic_normal(seed, first, count, len(factors) + remainder.numel()).to(factors.device)
        common, own = noise.split([len(factors), remainder.numel()], dim=1)
        drawn: Tensor = common @ factors.flatten(1) + remainder.flatten() * own
        return drawn.view(-1, *remainder.shape)


class Joint(Protocol):
    """What collects rows of statistics, (B, 2, ΣC) at a time, for a family."""

    def add(self, rows: Tensor) -> None: ...

    def distribution(self, fitted: Factorized) -> Fitted: ...


class Thinned:
    """Keeps at most `size` rows of a stream, spread evenly over it, for `Empirical`."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._stride = 1
        self._seen = 0
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self._rows += rows[-self._seen % self._stride :: self._stride].float()
        self._seen += len(rows)
        while len(self._rows) >= 2 * self._size:
            self._rows = self._rows[::2]
            self._stride *= 2

    def distribution(self, fitted: Factorized) -> Empirical:
        count = min(self._size, len(self._rows))
        places = torch.linspace(0, len(self._rows) - 1, count, dtype=torch.float64).round().long()
        return Empirical(**fields_of(fitted), observations=torch.stack([self._rows[i] for i in places.tolist()]))


class Sketch:
    """Follows the principal directions of a stream of rows in bounded memory, for `LowRank`.

    Of the scatter Σ (z − z̄)(z − z̄)ᵀ so far it keeps the leading part, as a few rows whose outer products add up to it;
    new rows are stacked below, with one for the change of the mean (Chan's formula), and the stack is cut back.
    """

    def __init__(self, rank: int = 10) -> None:
        self._rank = rank
        self._kept = 4 * rank + 20  # so that what is cut off on the way is small
        self._pending: list[Tensor] = []
        self._scale: Tensor | None = None
        self._count = 0
        self._mean = torch.zeros(0)
        self._matrix = torch.zeros(0)

    def add(self, rows: Tensor) -> None:
        if self._scale is None:  # what moves a normalised activation by one: μ by σ, log σ² by 2
            sigma = (rows[:, 1].mean(0) / 2).exp()
            self._scale = torch.stack([sigma, torch.full_like(sigma, 2)])
        self._pending.append((rows / self._scale).flatten(1))
        if sum(map(len, self._pending)) >= self._kept:
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
        self._matrix = directions[:, -self._kept :].T @ stack
        self._mean, self._count = mean, total

    def distribution(self, fitted: Factorized) -> LowRank:
        if self._pending:
            self._compress()
        assert self._scale is not None
        strongest = self._matrix.flip(0)[: self._rank] / math.sqrt(max(1, self._count - 1))
        return LowRank(**fields_of(fitted), factors=(strongest.view(-1, *self._scale.shape) * self._scale).float())


FAMILIES: dict[str, tuple[type[Fitted], type[Thinned] | type[Sketch] | None]] = {
    "factorized": (Factorized, None),
    "lowrank": (LowRank, Sketch),
    "empirical": (Empirical, Thinned),
}


def fields_of(fitted: Factorized) -> dict[str, Any]:
    """Returns what every family has."""
    return {field.name: getattr(fitted, field.name) for field in fields(fitted)}


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Fitted:
    """Reads a distribution that `stats.save(path)` wrote, and checks all of it before use.

    Raises:
        ValueError: The file is truncated, not ours, of another format version, or holds impossible numbers.

    Example:
        >>> import stochbn, tempfile
        >>> moments = Moments.of(torch.tensor([[[0.0], [0.0]], [[1.0], [0.5]]], dtype=torch.float64))
        >>> stats = Factorized({"bn": Layer(1e-5, moments)}, batch_size=16, num_batches=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stats.save(f"{folder}/net.sbn.safetensors")
        ...     stochbn.load(f"{folder}/net.sbn.safetensors")
        Factorized(1 layers, 1 channels, batch_size=16, num_batches=2)
    """
    header, tensors = storage.read(path, device)
    try:
        return _parse(header, tensors)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"Expected a sound stochbn file, got {path}: {reason}. Save it again.") from error


def _parse(header: dict[str, Any], tensors: dict[str, Tensor]) -> Fitted:
    def require(sound: bool, what: str) -> None:
        if not sound:
            raise ValueError(f"impossible {what}")

    if header["family"] not in FAMILIES:
        raise ValueError(f"unknown family {header['family']!r}")
    family, _ = FAMILIES[header["family"]]
    batch_size, num_batches, excluded = header["batch_size"], header["num_batches"], header["excluded"]
    require(type(batch_size) is int and batch_size >= 2, f"batch_size {batch_size!r}")
    require(type(num_batches) is int and num_batches >= 2, f"num_batches {num_batches!r}")
    require(isinstance(excluded, list) and all(isinstance(name, str) for name in excluded), "excluded layers")
    for flag in ("dropout", "conditioned"):
        require(type(header[flag]) is bool, flag)
    layers: dict[str, Layer] = {}
    for entry in header["layers"]:
        name, numbers = entry["name"], (entry["eps"], entry["weight"], entry["weight_sq"])
        require(isinstance(name, str) and name not in layers, f"layer name {name!r}")
        require(all(type(v) in (int, float) and 0 <= v < math.inf for v in numbers), f"numbers in layer {name!r}")
        eps, weight, weight_sq = map(float, numbers)
        require(0 < weight_sq < weight**2, f"weights in layer {name!r}")
        mean, deviation = tensors.pop(f"{name}.mean"), tensors.pop(f"{name}.deviation")
        require(mean.dtype == deviation.dtype == torch.float64, f"precision of layer {name!r}")
        require(mean.dim() == 2 and mean.shape == deviation.shape, f"shape of layer {name!r}")
        require(mean.shape[0] == 2 and mean.shape[1] > 0, f"shape of layer {name!r}")
        require(bool((mean.isfinite() & deviation.isfinite()).all()), f"NaN or Inf in layer {name!r}")
        require(bool((deviation >= 0).all()), f"variance in layer {name!r}")
        layers[name] = Layer(eps, Moments(weight, weight_sq, mean, deviation))
    require(bool(layers), "file without layers")
    common = Factorized(
        layers,
        batch_size,
        num_batches,
        tuple(excluded),
        header["dropout"],
        header["conditioned"],
        header["tuning"] and _parse_tuning(header["tuning"]),
    )
    arrays: dict[str, Any] = {}
    if family.array:
        array = arrays[family.array] = tensors.pop(family.array)
        require(
            array.dtype == torch.float32 and array.shape[1:] == common.centre.shape and len(array) > 0, family.array
        )
        require(bool(array.isfinite().all()), f"NaN or Inf in {family.array}")
    require(not tensors, f"tensors {sorted(tensors)}")
    return family(**fields_of(common), **arrays)


def _parse_tuning(found: dict[str, Any]) -> Tuning:
    spread = found["spread"]
    numbers = [*(spread.values() if isinstance(spread, dict) else [spread]), found["temperature"]]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"impossible tuning {numbers}")
    return Tuning(
        spread, found["temperature"], tuple((float(k), float(t), float(loss)) for k, t, loss in found["curve"])
    )
