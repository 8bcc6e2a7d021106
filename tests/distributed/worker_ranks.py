"""What three ranks find, of whom two may be a group."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stochbn
from jobs import run
from oracles import calibrate, small_cnn
from stochbn.distributed.agreement import describe
from stochbn.distributed.ranks import RankError, Ranks, together


def check_exchanges(rank: int, _: Path) -> None:
    ranks = Ranks(None, "fit")
    assert (ranks.rank, ranks.size) == (rank, 3)
    assert ranks.gather(rank) == [0, 1, 2]
    assert ranks.reduce(str(rank), str.__add__) == ("012" if rank == 0 else None)  # in their order
    assert ranks.first(f"from {rank}") == "from 0"
    for wanted in range(3):
        assert ranks.gather_to(wanted, rank) == ([0, 1, 2] if rank == wanted else None)
    assert ranks.agree({"a": 1, "b": rank if rank == 2 else None, "c": None}) == {"a": 1, "b": 2, "c": None}
    with pytest.raises(ValueError, match="Expected the same a on every rank, got 0 on rank 0 and 1 on rank 1"):
        ranks.agree({"a": rank})


def check_groups(rank: int, _: Path) -> None:
    group = dist.new_group([1, 2])
    batches = [torch.rand(16, 1, 8, 8) for _ in range(12)]
    model = calibrate(small_cnn(), batches)
    if rank == 0:
        with pytest.raises(RuntimeError, match="by the ranks of the group only, got a call by rank 0, which is not in"):
            stochbn.distributed.fit(model, batches, group=group, progress=False)
    else:
        ranks = Ranks(group, "fit")
        assert ranks.reduce(str(ranks.rank), str.__add__) == ("01" if rank == 1 else None)
        assert ranks.first(rank) == 1
        assert ranks.gather_to(1, rank) == ([1, 2] if rank == 2 else None)
        shard = batches[:5] if rank == 1 else batches[5:]
        stats = stochbn.distributed.fit(model, shard, group=group, progress=False)
        assert stats.num_batches == 12
        found = stochbn.distributed.predict(model, stats, batches, num_samples=3, gather=1, group=group)
        assert (found is None) == (rank == 1)
    # Three shards, of which one is empty: rank 2 has nobody to merge with at first.
    shard = [batches[:5], [], batches[5:]][rank]
    found = stochbn.distributed.fit(model, shard, family="empirical", num_kept=4, progress=False)
    whole = stochbn.fit(model, batches, family="empirical", num_kept=4, progress=False)
    assert torch.equal(found.observations, whole.observations)
    assert len(set(Ranks(None, "fit").gather(describe(found)))) == 1


def fail_together(culprit: int) -> None:
    with together(None, "outer"), together(None, "inner") as ranks:
        if ranks.rank == culprit:
            raise KeyError("fc")
        ranks.gather(None)


def check_errors_are_told_once(rank: int, _: Path) -> None:
    for culprit in range(3):
        kind, message = (KeyError, "fc") if rank == culprit else (RankError, f"on rank {culprit}: KeyError: 'fc'")
        with pytest.raises(kind, match=message):
            fail_together(culprit)
    assert Ranks(None, "fit").gather(rank) == [0, 1, 2]  # nobody is out of step


if __name__ == "__main__":
    run(globals())
