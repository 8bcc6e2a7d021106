"""What two ranks find: each check runs on both, after the other checks, in one job."""

import copy
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stochbn
from jobs import run
from oracles import calibrate, small_cnn
from stochbn.distributed import RankError
from stochbn.distributed.agreement import describe

QUIET = {"progress": False}
warnings.filterwarnings("ignore", "The model has seen|The NLL is lowest")
warnings.filterwarnings("ignore", "The loader does not")  # in a layer that is used twice, or after one


class Volumes(nn.Module):
    """Three kinds of BatchNorm, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(1, 3, 2)
        self.norm = nn.BatchNorm3d(3)
        self.flat = nn.BatchNorm1d(3, affine=False)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.norm(self.convolution(x.view(-1, 1, 4, 4, 4))).relu())
        return self.last(self.flat(x.flatten(2).mean(2)))


def make_batches(count: int = 12, size: int = 16) -> list[Tensor]:
    return [torch.rand(size, 1, 8, 8) for _ in range(count)]


def make_model(batches: list[Tensor]) -> nn.Module:
    return calibrate(small_cnn(), batches)


def make_labelled(model: nn.Module, batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [(x, (4 * model(x)).softmax(1).multinomial(1)[:, 0]) for x in batches]


def assert_same_everywhere(value: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, describe(value))
    assert len(set(found)) == 1, found


def assert_same_fit(found: stochbn.Distribution, expected: stochbn.Distribution) -> None:
    assert type(found) is type(expected)
    assert (found.num_batches, found.batch_size) == (expected.num_batches, expected.batch_size)
    assert list(found.layers) == list(expected.layers)
    torch.testing.assert_close(found.centre, expected.centre, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.std, expected.std, rtol=1e-9, atol=1e-12)
    if isinstance(expected, stochbn.Empirical):
        assert torch.equal(found.observations, expected.observations)
    if isinstance(expected, stochbn.LowRank):
        largest = float(expected.factors.abs().max())
        torch.testing.assert_close(found.factors, expected.factors, rtol=1e-6, atol=1e-6 * largest)
    assert_same_everywhere(found)


def assert_same_prediction(found: stochbn.Prediction, expected: stochbn.Prediction, exact: bool = True) -> None:
    for name in ("mean", "std", "samples", "expected_entropy", "counts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None and exact:
            assert torch.equal(one, other), name
        elif one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert (found.noise, found.num_samples) == (expected.noise, expected.num_samples)


def check_fit_is_that_of_one_process(rank: int, _: Path) -> None:
    batches = make_batches()
    shard = batches[:5] if rank == 0 else batches[5:]  # uneven
    for model in (make_model(batches), calibrate(Volumes(), batches)):
        for family in ("factorized", "lowrank", "empirical"):
            options = QUIET | {"family": family}
            if family != "factorized" and isinstance(model, Volumes):
                options["layers"] = ["flat"]  # a joint family wants layers that are used once
            before = describe(model)
            found = stochbn.distributed.fit(model, shard, **options)
            assert_same_fit(found, stochbn.fit(model, batches, **options))
            assert describe(model) == before


def check_kept_mini_batches_are_those_of_one_process(rank: int, _: Path) -> None:
    batches = make_batches(41)
    model = make_model(batches)
    shard = batches[:15] if rank == 0 else batches[15:]
    for options in ({"num_kept": 4}, {"num_kept": 7, "conditioned": True}):
        found = stochbn.distributed.fit(model, shard, family="empirical", **options, **QUIET)
        assert_same_fit(found, stochbn.fit(model, batches, family="empirical", **options, **QUIET))
    # Each batch of the loader is two mini-batches, and the last one is incomplete.
    data = TensorDataset(torch.cat(batches)[:640])
    loader = DataLoader(TensorDataset(data.tensors[0][slice(0, 320) if rank == 0 else slice(320, 640)]), 32)
    found = stochbn.distributed.fit(model, loader, family="empirical", num_kept=3, batch_size=16, **QUIET)
    whole = stochbn.fit(model, DataLoader(data, 32), family="empirical", num_kept=3, batch_size=16, **QUIET)
    assert_same_fit(found, whole)
    # Without a length nobody knows which mini-batch of all is the first: some of each shard are kept.
    found = stochbn.distributed.fit(model, iter(shard), family="empirical", num_kept=4, **QUIET)
    assert (found.num_batches, len(found.observations)) == (41, 4)


def check_a_rank_without_data(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    for idle in (0, 1):
        shard = [] if rank == idle else batches
        for options in ({"family": "empirical"}, {"family": "lowrank"}, {"layers": "last"}, {"standard_error": 0.3}):
            found = stochbn.distributed.fit(model, shard, **options, **QUIET)
            assert_same_fit(found, stochbn.fit(model, batches, **options, **QUIET))
    with pytest.raises((ValueError, RankError), match="at least 2 mini-batches to fit, got 0"):
        stochbn.distributed.fit(model, [], **QUIET)


def check_how_much_is_read(rank: int, _: Path) -> None:
    batches = make_batches(60)
    model = make_model(batches)
    shard = batches[:20] if rank == 0 else batches[20:]
    found = stochbn.distributed.fit(model, shard, num_batches=7, **QUIET)
    assert_same_fit(found, stochbn.fit(model, batches[:4] + batches[20:23], num_batches=7, **QUIET))
    found = stochbn.distributed.fit(model, batches[:2] if rank == 0 else batches[2:], num_batches=9, **QUIET)
    assert_same_fit(found, stochbn.fit(model, batches, num_batches=9, **QUIET))  # rank 1 takes what rank 0 lacks
    # Shards of two and of four rounds: one rank has to wait until all their data are as certain as that.
    target = float(largest_error(stochbn.fit(model, batches, **QUIET))) * 1.2
    found = stochbn.distributed.fit(model, shard, standard_error=target, **QUIET)
    assert_same_everywhere(found)
    assert 20 < found.num_batches < 60
    assert largest_error(found) <= target


def largest_error(stats: stochbn.Distribution) -> float:
    errors = stats.std / stats.num_batches**0.5
    return float(torch.stack([errors[0] / (stats.centre[1] / 2).exp(), errors[1]]).max())


def check_distributed_data_parallel(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    wrapped = DistributedDataParallel(model)
    if rank == 1:  # as after training, where each rank's running statistics are its own
        model[1].running_mean += 0.5
        model[1].num_batches_tracked += 1
    own = model[1].running_mean.clone()
    shard = batches[:4] if rank == 0 else batches[4:]
    found = stochbn.distributed.fit(wrapped, shard, layers=["4", "7"], **QUIET)
    assert list(found.layers) == ["4", "7"]
    assert found.excluded == ("1",)
    assert torch.equal(model[1].running_mean, own)
    prediction = stochbn.distributed.predict(wrapped, found, torch.cat(batches)[:10], num_samples=4)
    tuned = stochbn.distributed.tune(wrapped, found, make_labelled(model, batches), **QUIET)
    assert_same_everywhere(tuned)
    if rank == 0:  # rank 0's buffers are in use; and no plain call waits for the other rank
        assert_same_fit_alone(found, stochbn.fit(wrapped, batches, layers=["4", "7"], **QUIET))
        expected = stochbn.predict(wrapped, found, torch.cat(batches)[:10], num_samples=4)
        assert_same_prediction(prediction, expected, exact=False)
        with stochbn.track(wrapped) as tracker:
            for batch in batches[:3]:
                model.train()(batch)
        assert list(tracker.distribution().layers) == ["1", "4", "7"]
    model.eval()


def assert_same_fit_alone(found: stochbn.Distribution, expected: stochbn.Distribution) -> None:
    assert list(found.layers) == list(expected.layers)
    torch.testing.assert_close(found.centre, expected.centre, rtol=1e-12, atol=1e-13)


def check_synchronised_batch_norm(rank: int, _: Path) -> None:
    batches = make_batches(12, size=8)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.BatchNorm1d(5)]
    model = calibrate(nn.Sequential(*layers), batches)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    expected = stochbn.fit(model, [torch.cat(batches[i : i + 2]) for i in range(0, 12, 2)], **QUIET)
    shard = batches[:4] if rank == 0 else batches[4:]
    for options in ({}, {"batch_size": 16}):  # of the global batch, which normalised in training
        found = stochbn.distributed.fit(synchronised, shard, **options, **QUIET)
        assert_same_fit(found, expected)
    drawn = stochbn.distributed.predict(synchronised, found, batches, num_samples=3)
    assert_same_prediction(drawn, stochbn.predict(synchronised, found, batches, num_samples=3))


def check_sharding(rank: int, _: Path) -> None:
    batches = make_batches(9)
    model = make_model(batches)
    data = TensorDataset(torch.cat(batches)[:140])
    for size, shuffle in ((16, False), (16, True), (4, True)):
        generator = torch.Generator().manual_seed(3)  # then the order of one process is known
        loader = DataLoader(data, size, shuffle=shuffle, generator=generator)
        found = stochbn.distributed.fit(model, stochbn.distributed.shard(loader), family="empirical", **QUIET)
        generator.manual_seed(3)
        assert_same_fit(found, stochbn.fit(model, loader, family="empirical", **QUIET))
    odd = [*batches, batches[0][:5]]  # 10 of them, of which the last is incomplete
    kept = QUIET | {"family": "empirical", "num_kept": 3}
    found = stochbn.distributed.fit(model, stochbn.distributed.shard(odd), **kept)
    assert_same_fit(found, stochbn.fit(model, odd, **kept))
    odd = [torch.cat(batches[:4]), batches[0][:5]]  # rank 1 has the incomplete one alone
    found = stochbn.distributed.fit(model, stochbn.distributed.shard(odd), batch_size=16, **kept)
    assert_same_fit(found, stochbn.fit(model, odd, batch_size=16, **kept))
    sampler: DistributedSampler[Any] = DistributedSampler(data)  # the usual way
    found = stochbn.distributed.fit(model, DataLoader(data, 10, sampler=sampler), **QUIET)
    assert found.num_batches == 14
    assert_same_everywhere(found)


def check_plain_functions_never_communicate(rank: int, _: Path) -> None:
    batches = make_batches(9)
    model = make_model(batches)
    shard = stochbn.distributed.shard(make_labelled(model, batches))
    if rank == 0:  # which would wait for rank 1
        with within(seconds=20):
            found = stochbn.fit(model, shard, family="empirical", **QUIET)
            assert torch.equal(
                found.observations, stochbn.fit(model, batches[:4], family="empirical", **QUIET).observations
            )
            stochbn.tune(model, found, shard, **QUIET)
    dist.barrier()
    assert stochbn.distributed.fit(model, shard, **QUIET).num_batches == 9


def check_predictions_are_those_of_one_process(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    stats = stochbn.fit(model, batches, **QUIET)
    data = TensorDataset(torch.rand(75, 1, 8, 8), torch.zeros(75))
    single = torch.rand(33, 1, 8, 8)
    loaders: list[Any] = [
        DataLoader(data, 16),  # 5 batches for 2 ranks, the last of them smaller
        DataLoader(data, 100),  # one: a rank without inputs
        DataLoader(data, 10, drop_last=True),
        DataLoader(data, batch_size=None, sampler=[[*range(40)], [*range(40, 75)]]),
        DataLoader(data, batch_sampler=[[5, 2], [3], [70, 1, 0]]),
        [data[:20], data[20:21], data[21:75]],
        [batches[0]],
    ]
    for loader in loaders:
        for options in ({}, {"keep_samples": False}, {"num_samples": "auto", "tolerance": 0.5}):
            options = {"num_samples": 6} | options
            found = stochbn.distributed.predict(model, stats, loader, **options)
            assert_same_prediction(found, stochbn.predict(model, stats, loader, **options))
    # A single batch is cut between its inputs.
    for count in (1, 2, 7, 33):
        found = stochbn.distributed.predict(model, stats, single[:count], num_samples=6)
        assert_same_prediction(found, stochbn.predict(model, stats, single[:count], num_samples=6), exact=False)


def check_predictions_that_one_rank_gets(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    stats = stochbn.fit(model, batches, **QUIET)
    for wanted in (0, 1):
        found = stochbn.distributed.predict(model, stats, batches, gather=wanted, num_samples=4)
        assert (found is not None) == (rank == wanted)
        if found is not None:
            assert_same_prediction(found, stochbn.predict(model, stats, batches, num_samples=4))
    with pytest.raises(ValueError, match="gather to be a rank of the group, below 2, got 2"):
        stochbn.distributed.predict(model, stats, batches, gather=2)


def check_predictions_of_all_kinds(rank: int, _: Path) -> None:
    batches = make_batches()
    models = [make_model(batches), make_model(batches)]
    many = [stochbn.fit(model, batches, **QUIET) for model in models]
    found = stochbn.distributed.predict(models, many, batches[:3], num_samples=4)
    assert_same_prediction(found, stochbn.predict(models, many, batches[:3], num_samples=4))
    found = stochbn.distributed.predict(models, None, batches[:3])
    assert_same_prediction(found, stochbn.predict(models, None, batches[:3]))
    torch.manual_seed(rank)  # seeds of their own would give ranks networks of their own
    found = stochbn.distributed.predict(models[0], many[0], batches[:3], seed=None, num_samples=4)
    assert_same_everywhere(stochbn.Draws({"mean": found.mean}))
    dataset = TensorDataset(torch.cat(batches))
    torch.manual_seed(rank)  # a random order too is the same for all
    found = stochbn.distributed.predict(models[0], many[0], DataLoader(dataset, 16, shuffle=True), num_samples=4)
    expected = stochbn.predict(models[0], many[0], DataLoader(dataset, 16), num_samples=4)
    torch.testing.assert_close(found.mean.sort(0).values, expected.mean.sort(0).values, rtol=1e-5, atol=1e-6)
    noisy = stochbn.distributed.tune(
        models[0], many[0], [(x, torch.randn(16, 3)) for x in batches], link="identity", **QUIET
    )
    found = stochbn.distributed.predict(models[0], noisy, batches, link="identity", num_samples=4)
    assert_same_prediction(found, stochbn.predict(models[0], noisy, batches, link="identity", num_samples=4))
    assert found.noise is not None


def check_tuning_is_that_of_one_process(rank: int, _: Path) -> None:
    batches = make_batches(9)
    model = make_model(batches)
    labelled = make_labelled(model, batches)
    stats = stochbn.fit(model, batches, **QUIET)
    data = TensorDataset(torch.cat(batches), torch.cat([y for _, y in labelled]))
    regression = [(x, torch.randn(16, 3)) for x in batches]
    for loader, options in (
        (labelled, {}),
        (labelled[:1], {}),  # a rank without data
        (DataLoader(data, 32), {"num_groups": 2}),
        (regression, {"link": "identity"}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = stochbn.distributed.tune(model, stats, loader, **options, **QUIET)
            expected = stochbn.tune(model, stats, loader, **options, **QUIET)
        assert found.tuning == expected.tuning
        assert_same_everywhere(found)
    assert stochbn.distributed.tune(model, None, labelled, **QUIET) == stochbn.tune(model, None, labelled, **QUIET)
    torch.manual_seed(rank)
    assert_same_everywhere(stochbn.distributed.tune(model, stats, labelled, seed=None, **QUIET))
    with pytest.raises(ValueError, match="at least one batch of held-out data"):
        stochbn.distributed.tune(model, stats, [], **QUIET)


def check_bad_loaders(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    stats = stochbn.fit(model, batches, **QUIET)
    data = TensorDataset(torch.cat(batches))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for function, given in ((stochbn.distributed.predict, loader), (stochbn.distributed.tune, loader)):
        with pytest.raises(ValueError, match="a DistributedSampler, which has cut them between processes already"):
            function(model, stats, given)
    with pytest.raises(ValueError, match="DistributedSampler"):
        stochbn.distributed.shard(loader)
    with pytest.raises(TypeError, match="a loader with a length, to be cut between processes, got list_iterator"):
        stochbn.distributed.predict(model, stats, iter(batches))
    with pytest.raises(TypeError, match="Expected a DataLoader or another iterable of batches, got TensorDataset"):
        stochbn.distributed.fit(model, data)
    with pytest.raises(ValueError, match="the same number of batches on every rank, got 12 on rank 0 and 11 on rank 1"):
        stochbn.distributed.predict(model, stats, batches[rank:])
    with pytest.raises(
        ValueError, match=r"the same inputs on every rank, got 16 \(.*\) on rank 0 and 15 \(.*\) on rank 1"
    ):
        stochbn.distributed.predict(model, stats, batches[0][rank:])
    with pytest.raises(ValueError, match="the same inputs on every rank"):  # a shard each
        stochbn.distributed.predict(model, stats, batches[rank])
    with pytest.raises(ValueError, match="at least one batch of inputs, got an empty loader"):
        stochbn.distributed.predict(model, stats, [])


def check_calls_that_differ(rank: int, _: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    stats = stochbn.fit(model, batches, **QUIET)
    with pytest.raises(ValueError, match="the same num_samples on every rank, got 5 on rank 0 and 6 on rank 1"):
        stochbn.distributed.predict(model, stats, batches, num_samples=5 + rank)
    with pytest.raises(ValueError, match="the same family on every rank, got 'lowrank' on rank 0 and 'empirical'"):
        stochbn.distributed.fit(model, batches, family=["lowrank", "empirical"][rank])
    with pytest.raises(ValueError, match="the same gather on every rank, got 0 on rank 0 and 1 on rank 1"):
        stochbn.distributed.predict(model, stats, batches, gather=rank)
    with pytest.raises(ValueError, match=r"the same stats on every rank, got Factorized\(3 layers"):
        stochbn.distributed.predict(model, stats if rank else stats.merge(stats), batches)
    with pytest.raises(ValueError, match="the same batch_size on every rank, got 16 on rank 0 and 8 on rank 1"):
        stochbn.distributed.fit(model, make_batches(12, [16, 8][rank]), **QUIET)
    function, given = [(stochbn.distributed.fit, ()), (stochbn.distributed.tune, (stats,))][rank]
    with pytest.raises(ValueError, match="the same function on every rank, got fit on rank 0 and tune on rank 1"):
        function(model, *given, batches, **QUIET)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        stochbn.distributed.fit(model, batches, batchsize=16)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += rank
    with pytest.raises(ValueError, match=r"the same model on every rank, got Sequential of 13 parameters .* on rank 0"):
        stochbn.distributed.fit(model, batches, **QUIET)


def check_a_rank_that_raises(rank: int, folder: Path) -> None:
    batches = make_batches()
    model = make_model(batches)
    stats = stochbn.fit(model, batches, **QUIET)

    def damaged(*_: Any) -> Iterator[Tensor]:
        yield from batches[:3]
        raise OSError("the disk is gone")

    class Damaged(list):  # type: ignore[type-arg]
        __iter__ = damaged

    given: Any = Damaged(batches) if rank == 1 else batches
    expected = (RankError, "rank to fit, got an error on rank 1: OSError: the disk is gone")
    kind, message = (OSError, "^the disk is gone") if rank == 1 else expected
    with pytest.raises(kind, match=message):
        stochbn.distributed.fit(model, given, **QUIET).save(folder / "failed.safetensors")
    broken = [batches[0], batches[0], batches[0].clone(), batches[0]]
    broken[2][0] = torch.nan  # in the slice of rank 1
    message = (
        "rank to predict, got an error on rank 1: ValueError: Expected finite" if rank == 0 else "^Expected finite"
    )
    with pytest.raises((ValueError, RankError), match=message):
        stochbn.distributed.predict(model, stats, broken, num_samples=4)
    with pytest.raises((ValueError, RankError), match="NaN or Inf"):
        stochbn.distributed.tune(
            model, stats, [*make_labelled(model, batches[:2]), (broken[2], torch.zeros(16).long())]
        )
    assert not list(folder.glob("*.safetensors*"))
    assert not list(folder.glob(".*.tmp"))
    # After that the ranks are in step again.
    assert_same_fit(
        stochbn.distributed.fit(model, batches[rank::2], **QUIET),
        stochbn.fit(model, batches[::2] + batches[1::2], **QUIET),
    )


def check_a_rank_that_is_too_slow(rank: int, _: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    batches = make_batches()
    model = make_model(batches)
    if rank == 0:
        with within(seconds=20), pytest.raises(RankError, match="got no answer from one within the group's timeout"):
            stochbn.distributed.fit(model, batches, group=group, **QUIET)
    dist.barrier()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def check_a_rank_that_dies(rank: int, folder: Path) -> None:
    batches = make_batches()
    model = make_model(batches)

    def dying(*_: Any) -> Iterator[Tensor]:
        yield from batches[:3]
        (folder / "a_rank_that_dies-1.json").write_text('""')
        os._exit(1)

    class Dying(list):  # type: ignore[type-arg]
        __iter__ = dying

    given: Any = Dying(batches) if rank == 1 else batches
    with within(seconds=30), pytest.raises(RankError, match="It has died, or was too slow"):
        stochbn.distributed.fit(model, given, **QUIET).save(folder / "dead.safetensors")
    assert not list(folder.glob("*.safetensors*"))
    assert not list(folder.glob(".*.tmp"))


if __name__ == "__main__":
    run(globals())
