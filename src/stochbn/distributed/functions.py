"""`fit`, `tune` and `predict` as the ranks of a job call them together."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stochbn.distributed.agreement import check_call, digest, with_first_buffers
from stochbn.distributed.ranks import Ranks, together
from stochbn.distributions.base import Distribution
from stochbn.distributions.fit import fit as plain_fit
from stochbn.distributions.seeds import random_seed
from stochbn.distributions.tuning import Tuning
from stochbn.inference.predict import Stats, is_loader
from stochbn.inference.predict import predict as plain_predict
from stochbn.inference.prediction import Prediction, join
from stochbn.inference.tune import tune as plain_tune
from stochbn.statistics.calls import device_of, unwrap
from stochbn.statistics.checks import check_whole
from stochbn.statistics.items import num_examples, rows, tensors_in
from stochbn.statistics.parts import ALONE, cut, own, slice_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T", bound=Distribution | Sequence[Distribution])
Models = nn.Module | Sequence[nn.Module]


def fit(
    model: nn.Module, loader: Iterable[Any], *, group: "ProcessGroup | None" = None, **options: Any
) -> Distribution:
    """Fits as `stochbn.fit` does, each rank to its own shard of the data, and returns the same to every rank.

    It is the fit of one process to the mini-batches of rank 0, then those of rank 1, and so on: to rounding for moments
    and to the bit for mini-batches that are kept, if the loaders know their lengths. Shards may differ in size, or be
    empty. Factors of "lowrank" are the same to rounding up to 4 · rank + 20 mini-batches a rank; beyond, each rank
    follows the strongest directions of its own.

    In a model with SyncBatchNorm, which normalises by the mini-batches of all ranks together, a mini-batch is as many
    successive batches of a loader as there were ranks. So M is that of training again; `batch_size=` is that M.

    Args:
        model: As in `stochbn.fit`, with the same parameters on every rank. Buffers are those of rank 0. What
            DistributedDataParallel is wrapped around keeps its names.
        loader: This rank's shard, such as a DataLoader with a DistributedSampler, or what `shard` returned.
        group: Whose ranks call this; None for all of the job.
        options: As in `stochbn.fit`, the same on every rank. `num_batches` counts those of all ranks, who take equal
            shares; it is at most that if a rank has fewer and its loader knows no length. `standard_error` is that of
            all their data.

    Raises:
        ValueError: Models or options differ; the message names the ranks.
        RankError: Another rank failed, or did not answer within the group's timeout.

    Examples:
        >>> import stochbn, torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # with torchrun: no arguments
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=None))
        >>> shard = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in shard:
        ...     _ = model(batch)
        >>> stochbn.distributed.fit(model, shard, progress=False)
        Factorized(1 layers, 3 channels, batch_size=16, num_batches=10)
        >>> dist.destroy_process_group()
    """
    with together(group, "fit") as ranks:
        options = check_call(plain_fit, ranks, model=model, loader=loader, **options)
        part = own(loader, ranks)
        num_synchronised = _count_synchronised(unwrap(model))
        if num_synchronised > 1:
            part = part.regroup(num_synchronised)
        return plain_fit(with_first_buffers(model, ranks), part, **options)


@overload
def tune(
    model: Models, stats: None, loader: Iterable[Any], *, group: "ProcessGroup | None" = None, **options: Any
) -> Tuning: ...
@overload
def tune(
    model: Models, stats: T, loader: Iterable[Any], *, group: "ProcessGroup | None" = None, **options: Any
) -> T: ...
def tune(
    model: Models, stats: Any, loader: Iterable[Any], *, group: "ProcessGroup | None" = None, **options: Any
) -> Any:
    """Tunes as `stochbn.tune` does, each rank on a slice of the held-out data, and returns the same to every rank.

    The losses of all inputs are put together in their order, so that what is chosen is what one process would choose.

    Args:
        model: As in `fit`.
        stats: As in `stochbn.tune`.
        loader: All of the held-out data, on every rank; it is cut as in `predict`.
        group: As in `fit`.
        options: As in `stochbn.tune`, the same on every rank.

    Raises:
        ValueError: As in `fit`; or the loader has a DistributedSampler.
        RankError: As in `fit`.

    Examples:
        >>> import stochbn, torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
        >>> batches = [(x, x.softmax(1).multinomial(1)[:, 0]) for x in torch.randn(10, 16, 3)]
        >>> for x, _ in batches:
        ...     _ = model(x)
        >>> stochbn.distributed.tune(model, None, batches, progress=False).spread is None
        True
        >>> dist.destroy_process_group()
    """
    with together(group, "tune") as ranks:
        options = check_call(plain_tune, ranks, model=model, stats=stats, loader=loader, **options)
        if options["seed"] is None:
            options["seed"] = ranks.first(random_seed())
        return plain_tune(with_first_buffers(model, ranks), stats, cut(loader, ranks), **options)


@overload
def predict(
    model: Models,
    stats: Stats | Sequence[Stats],
    inputs: Any,
    *,
    group: "ProcessGroup | None" = None,
    gather: None = None,
    **options: Any,
) -> Prediction: ...
@overload
def predict(
    model: Models,
    stats: Stats | Sequence[Stats],
    inputs: Any,
    *,
    group: "ProcessGroup | None" = None,
    gather: int,
    **options: Any,
) -> Prediction | None: ...
def predict(
    model: Models,
    stats: Stats | Sequence[Stats],
    inputs: Any,
    *,
    group: "ProcessGroup | None" = None,
    gather: int | None = None,
    **options: Any,
) -> Prediction | None:
    """Predicts as `stochbn.predict` does, each rank a slice of the inputs, and returns all predictions in their order.

    Draws are a function of seed and index, so every rank has the same networks. A loader is cut between its batches:
    then predictions are those of one process, to the bit on equal machines. A single batch is cut between its inputs,
    and predictions are the same to rounding. No input is predicted twice, and none carries a gradient.

    Args:
        model: As in `fit`.
        stats: As in `stochbn.predict`.
        inputs: All of them, on every rank: as in `stochbn.predict`, where a loader has to have a length. Of a
            DataLoader each rank reads its own slice; if its order is random, it is that of rank 0 for all.
        group: As in `fit`.
        gather: The one rank of the group to have the predictions, while the others get None. By default all have them.
        options: As in `stochbn.predict`, the same on every rank.

    Raises:
        ValueError: As in `fit`; or the loader has a DistributedSampler, which cuts it already and repeats inputs.
        RankError: As in `fit`.

    Examples:
        >>> import stochbn, torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
        >>> batches = [torch.randn(16, 2) for _ in range(10)]
        >>> for batch in batches:
        ...     _ = model(batch)
        >>> stats = stochbn.fit(model, batches, progress=False)
        >>> stochbn.distributed.predict(model, stats, batches, num_samples=8)
        Prediction(160×3, link='softmax', num_samples=8)
        >>> dist.destroy_process_group()
    """
    with together(group, "predict") as ranks:
        options = check_call(plain_predict, ranks, model=model, stats=stats, inputs=inputs, **options)
        ranks.agree({"gather": str(gather)})
        if gather is not None and check_whole("gather", gather, 0) >= ranks.size:
            raise ValueError(f"Expected gather to be a rank of the group, below {ranks.size}, got {gather}.")
        if options["seed"] is None:
            options["seed"] = ranks.first(random_seed())
        networks = with_first_buffers(model, ranks)
        mine = _cut_inputs(inputs, ranks)
        found = None if mine is None else plain_predict(networks, stats, mine, **options)
        sent = None if found is None else _move(found, torch.device("cpu"))
        parts = ranks.gather(sent) if gather is None else ranks.gather_to(gather, sent)
        if parts is None:
            return None
        known = [part for part in parts if part is not None]
        whole = join(known)
        return replace(_move(whole, _device(networks)), noise=known[0].noise)


def shard(loader: Iterable[Any], *, group: "ProcessGroup | None" = None) -> Iterable[Any]:
    """Returns this rank's slice of a loader that every rank has, for `fit`: whole batches, one after the other.

    Unlike a DistributedSampler it repeats no example, and the ranks together have the batches that one process would
    have. The loader's order may be random; it is that of rank 0 for all. Every rank has to call it. What it returns
    communicates no more: with it, the plain functions work on this rank's slice alone.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> len(list(shard([torch.randn(16, 2) for _ in range(10)])))
        10
        >>> dist.destroy_process_group()
    """
    with together(group, "shard") as ranks:
        return cut(loader, ranks).read_by(ALONE)


def _count_synchronised(model: nn.Module) -> int:
    """Returns how many ranks' mini-batches SyncBatchNorm normalises together; 1 without such layers."""
    groups = [layer.process_group for layer in model.modules() if isinstance(layer, nn.SyncBatchNorm)]
    return max((dist.get_world_size(group) for group in groups), default=1)


def _cut_inputs(inputs: Any, ranks: Ranks) -> Any:
    """Returns this rank's slice of the inputs, or None if none are left for it."""
    if is_loader(inputs):
        part = cut(inputs, ranks)
        return None if part.num_examples == 0 else part
    count = num_examples(inputs)
    content = digest({str(number): tensor for number, tensor in enumerate(tensors_in(inputs))})
    ranks.agree({"inputs": f"{count} ({content})"})  # and not a shard each, which would be cut twice
    mine = slice_of(count, ranks)
    return rows(inputs, mine.start, mine.stop) if mine else None


def _move(prediction: Prediction, device: torch.device) -> Prediction:
    values = {field.name: getattr(prediction, field.name) for field in fields(prediction)}
    moved: dict[str, Any] = {name: v.detach().to(device) for name, v in values.items() if isinstance(v, Tensor)}
    return replace(prediction, **moved)


def _device(model: Any) -> torch.device:
    return device_of(model if isinstance(model, nn.Module) else model[0])
