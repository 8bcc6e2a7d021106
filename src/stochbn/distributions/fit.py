"""Data → distribution, in one pass over a loader."""

import itertools
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stochbn.distributions.base import Collector, Distribution
from stochbn.distributions.collected import Collected
from stochbn.distributions.files import FAMILIES
from stochbn.distributions.mistakes import warn_of_drift, warn_of_order, warn_of_size
from stochbn.statistics.calls import Call, call_on_inputs, device_of, unwrap, without_labels
from stochbn.statistics.checks import check_whole
from stochbn.statistics.items import copy_to, num_examples, rows
from stochbn.statistics.layers import Layers, all_batch_norms, dropout_layers, find_layers
from stochbn.statistics.mini_batches import STACKED_EXAMPLES, mini_batches
from stochbn.statistics.normalization import BatchNormalization, BatchNormCall, Observed, call_answered
from stochbn.statistics.parts import Part, Peers, divide, peers_of
from stochbn.statistics.progress import progress_bar
from stochbn.statistics.restoring import KeepingModes, keeping_tensors
from stochbn.statistics.twin import make_twin, reorder_convolutions

# Observations are added up, and standard errors computed, after so many forward passes.
TOGETHER = 10
COMPARED = 8  # mini-batches whose inputs are compared with each other


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    batch_size: int | None = None,
    num_batches: int | None = None,
    standard_error: float | None = None,
    dropout: bool = False,
    layers: Layers | Literal["last"] = None,
    call: Call | None = None,
    family: Literal["factorized", "lowrank", "empirical"] = "factorized",
    rank: int | None = None,
    num_kept: int | None = None,
    conditioned: bool = False,
    progress: bool = True,
) -> Distribution:
    """Fits r(μ) r(σ) to the batch statistics of training data in one pass. The model is left as it was.

    Minimises KL( (1/N) Σ p(μ, σ | x_i) ‖ r(μ) r(σ) ) (below eq. 4), which is to match moments: mean and unbiased
    variance of each channel's batch mean, and of its log(σ² + ε), over the mini-batches.

    Args:
        model: Any trained network with BatchNorm layers, in any mode.
        loader: Shuffled training data, preprocessed as in training: a DataLoader or any iterable of batches.
        batch_size: M, the size of the mini-batches that the model was trained with. By default the loader's. A loader
            of larger batches is faster and gives the same: each is cut into mini-batches that are normalised apart.
        num_batches: Use only that many mini-batches.
        standard_error: Stop when no channel's centre has a standard error above this: of μ in units of the channel's σ,
            and of log σ² (0.01, say). The fitted spreads are then as certain. By default the whole loader is used.
        dropout: Keep dropout layers active, for `predict(…, dropout=True)`.
        layers: The BatchNorm layers to treat: names or patterns, a predicate of name and module, or "last" for the one
            that a forward pass comes to last. The others keep to their running statistics, here and in prediction.
        call: How the model is called on what the loader yields, `call(model, batch)`. By default a tensor, or the first
            of a tuple or list such as `(x, y)`, is the model's argument, and a mapping holds its keywords.
        family: The distribution around these moments. The paper's "factorized" has independent channels. "lowrank" adds
            common factors of all layers, "empirical" keeps statistics of real mini-batches.
        rank: Of "lowrank", how many factors; 10 by default.
        num_kept: Of "empirical", how many mini-batches are kept at most; 256 by default.
        conditioned: In prediction, count each input as one of the M that normalise it.
        progress: Show a progress bar.

    Returns:
        The distribution, to sample from, to `save` and to `predict` with.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        >>> loader = [(torch.rand(32, 1, 8, 8), torch.zeros(32)) for _ in range(5)]
        >>> for x, _ in 2 * loader:
        ...     _ = model(x)
        >>> fit(model, loader, batch_size=16, progress=False)
        Factorized(1 layers, 4 channels, batch_size=16, num_batches=10)
    """
    collector = _make_collector(family, rank=rank, num_kept=num_kept)
    for name, value in (("batch_size", batch_size), ("num_batches", num_batches)):
        if value is not None:
            check_whole(name, value, 2)
    if standard_error is not None and not standard_error > 0:
        raise ValueError(f"Expected a standard_error above 0, got {standard_error}. Pass 0.01, say, or leave it out.")
    model, pick, call = unwrap(model), None if call else without_labels, call or call_on_inputs
    last = isinstance(layers, str) and layers == "last"
    chosen = find_layers(model, _has_statistics if last else layers)
    if dropout:
        dropout_layers(model)
    peers = peers_of(loader)
    own_number = None
    if num_batches is not None:
        known = loader.num_mini_batches(batch_size) if isinstance(loader, Part) else None
        own_number = divide(num_batches, peers.gather(known))[peers.rank]
    with (
        KeepingModes(),
        torch.no_grad(),
        progress_bar("fit", "batch", length_hint(loader) or None, shown=progress) as bar,
    ):
        parts = mini_batches(loader, batch_size=batch_size, num_batches=own_number, pick=pick, is_slice=peers.size > 1)
        if last:
            chosen, parts = _keep_last(model, call, chosen, parts)
        collected = Collected(joint=collector, order=chosen)
        if collector is not None and isinstance(loader, Part):
            collector.start_at(_count_before(loader, batch_size, own_number))
        run = _Pass(model, call, chosen, dropout)
        is_certain = False
        for is_added in _collect(collected, run, parts):
            bar.update()
            if is_added and progress:
                bar.set_postfix(standard_error=f"{collected.standard_error(chosen):.4f}", refresh=False)
            if is_added and standard_error is not None:
                is_certain = _is_certain(collected, peers, standard_error, is_over=False)
                if is_certain:
                    break
        while standard_error is not None and not is_certain:  # others may still have data
            is_certain = _is_certain(collected, peers, standard_error, is_over=True)
    agreed = peers.agree(collected.agreement())
    merged = peers.reduce(collected, Collected.merge)
    if merged is None:
        return peers.first(None)
    if merged.num_batches < 2:
        raise ValueError(
            f"Expected at least 2 mini-batches to fit, got {merged.num_batches}. "
            "Pass a longer loader or a smaller batch_size=."
        )
    chosen = {name: layer for name, layer in all_batch_norms(model).items() if name in agreed["layers"]}
    moments = merged.distribution(model, chosen, dropout=dropout, conditioned=conditioned)
    stats = moments if merged.joint is None else merged.joint.distribution(moments)
    warn_of_drift(stats, model)
    warn_of_order(moments, run.normalization.within)
    if num_batches is None and standard_error is None:
        warn_of_size(moments, model)
    return peers.first(stats)


def _is_certain(collected: Collected, peers: Peers, standard_error: float, *, is_over: bool) -> bool:
    """Returns whether what all readers have collected is as certain as it should be, or all is read."""
    found = peers.gather((collected.only_moments(), is_over))
    joined = Collected()
    for part, _ in found:
        joined = joined.merge(part)
    return all(over for _, over in found) or joined.standard_error(joined.chosen) <= standard_error


def _count_before(part: Part, batch_size: int | None, num_batches: int | None) -> int:
    """Returns how many mini-batches are collected by the readers before this one; 0 if somebody does not know."""
    count = part.num_mini_batches(batch_size)
    if count is not None and num_batches is not None:
        count = min(count, num_batches)
    counts = part.peers.gather(count)
    return 0 if None in counts else sum(known for known in counts[: part.peers.rank] if known)


def _make_collector(family: str, **sizes: int | None) -> Collector | None:
    """Returns what a family collects beyond moments; the sizes are `rank` and `num_kept`, where given."""
    if family not in FAMILIES:
        raise ValueError(f"Expected family to be one of {', '.join(map(repr, FAMILIES))}, got {family!r}.")
    given = {name: check_whole(name, value, 1) for name, value in sizes.items() if value is not None}
    for name in given:
        owner = {"rank": "lowrank", "num_kept": "empirical"}[name]
        if family != owner:
            raise ValueError(f"Expected {name}= with family={owner!r}, got it with {family!r}. Leave it out.")
    collector = FAMILIES[family].collector
    return None if collector is None else collector(**given)


def _has_statistics(_: str, layer: nn.Module) -> bool:
    return layer.running_mean is not None


def _keep_last(
    model: nn.Module, call: Call, layers: dict[str, _BatchNorm], parts: Iterator[tuple[Any, int, int]]
) -> tuple[dict[str, _BatchNorm], Iterator[tuple[Any, int, int]]]:
    """Finds the last layer that a forward pass calls, on a mini-batch that it puts back in front of the others."""
    observed = Observed(layers)
    called: list[str | None] = []

    def note(arguments: BatchNormCall) -> Tensor:
        called.append(observed.name(arguments))
        return F.batch_norm(*arguments)

    first = next(parts, None)
    if first is None:
        return layers, parts
    item, _, size = first
    call_answered(note, call, make_twin(model), copy_to(rows(item, 0, size), device_of(model)))
    last = [name for name in called if name is not None][-1:]
    return {name: layers[name] for name in last} or layers, itertools.chain([first], parts)


def _collect(collected: Collected, run: "_Pass", parts: Iterator[tuple[Any, int, int]]) -> Iterator[bool]:
    """Runs the model over all mini-batches, as many in a pass as suit it.

    Yields after each item of the loader whether something was added to what is collected.
    """
    pending: list[int] = []
    for item, count, size in parts:
        collected.batch_size = size
        together = max(1, STACKED_EXAMPLES // size)
        for start in range(0, count, together):
            some = min(together, count - start)
            run(item if some == count else rows(item, start * size, (start + some) * size), some)
            pending.append(some)
        is_full = len(pending) >= TOGETHER
        if is_full:
            collected.add(run.observed.take(), pending)
            pending = []
        yield is_full
    if pending:
        collected.add(run.observed.take(), pending)


class _Pass:
    """Runs a twin of the model for its statistics, with convolutions channels-last if they come out the same so."""

    def __init__(self, model: nn.Module, call: Call, layers: dict[str, _BatchNorm], dropout: bool) -> None:
        self.normalization = BatchNormalization(layers)
        self.observed = self.normalization.observed
        self._model = model
        self._call = call
        self._layers = layers
        self._twin = make_twin(model, dropout=dropout)
        self._is_checked = False

    def __call__(self, item: Any, num_batches: int) -> None:
        if not self._is_checked:
            self._is_checked = True
            if self._bears_channels_last(rows(item, 0, num_examples(item) // num_batches)):
                reorder_convolutions(self._twin)
        # Some mini-batches show how much inputs differ, which the others need not be searched for.
        is_enough = sum(map(len, next(iter(self.normalization.within.values()), []))) >= COMPARED
        self.normalization.num_inputs = 0 if is_enough else num_examples(item)
        self._run(self._twin, self.normalization, item, num_batches)

    def _run(self, twin: nn.Module, normalization: BatchNormalization, item: Any, num_batches: int) -> None:
        normalization.num_batches = num_batches
        with keeping_tensors(twin):
            call_answered(normalization.answer, self._call, twin, copy_to(item, device_of(twin)))

    def _bears_channels_last(self, mini_batch: Any) -> bool:
        """Returns whether the statistics of a mini-batch, without dropout, are the same in both layouts."""
        twins = make_twin(self._model), make_twin(self._model)
        if not reorder_convolutions(twins[1]):
            return False
        seen = []
        for twin in twins:
            normalization = BatchNormalization(self._layers)
            try:
                self._run(twin, normalization, mini_batch, 1)
            except Exception:  # the model's own layout will show whether that is its fault
                return False
            seen.append(normalization.observed.take())
        own, reordered = seen
        return own.keys() == reordered.keys() and all(
            torch.allclose(own[name], reordered[name], rtol=1e-3, atol=1e-3 * float(own[name].abs().max()))
            for name in own
        )
