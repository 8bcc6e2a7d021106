"""`fit`, `tune` and `predict` inside a torch.distributed job: called by every rank, with one result for all of them.

The plain functions never communicate, so `if rank == 0: stochbn.fit(…)` cannot hang.
"""

from stochbn.distributed.functions import fit, predict, shard, tune
from stochbn.distributed.ranks import RankError

__all__ = ["RankError", "fit", "predict", "shard", "tune"]
