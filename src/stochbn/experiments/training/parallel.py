"""One network trained by several processes, so that it becomes what one process would make of it.

Each takes the same part of every batch, and DistributedDataParallel averages their gradients. BatchNorm normalises
within a process, so a part has to hold whole mini-batches of M; then every image meets the statistics that it would
meet in one process. Running statistics move by all mini-batches in their order. What remains different is rounding,
and the masks of dropout, which each process draws for itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from stochbn.distributed.ranks import RankError
from stochbn.distributions.seeds import derive_seed
from stochbn.distributions.storage import brief
from stochbn.experiments.training.recipes import Recipe
from stochbn.statistics.parts import Peers, slice_of


class Parallel:
    """A network as all processes of a job train it; with one process, the network itself.

    Args:
        network: The same on all of them.
        recipe: Says how large batches and mini-batches are.
        seed: Of the run.
        peers: The processes.

    Raises:
        ValueError: The batch does not hold whole mini-batches for each process.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, seed: int, peers: Peers) -> None:
        size = recipe.mini_batch_size
        if recipe.batch_size % (size * peers.size):
            raise ValueError(
                f"Expected batches with whole mini-batches of M = {size} for each of {peers.size} processes, got "
                f"{recipe.batch_size} images: BatchNorm normalises within a process, so M would be another. Pass "
                f"--batch-size {size * peers.size} --ghost-size {size}, or train networks side by side with reproduce."
            )
        self._seed = seed
        self._peers = peers
        self._num_groups = recipe.batch_size // size // peers.size
        self._norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
        mine = slice_of(recipe.batch_size, peers)
        self.images = slice(mine.start, mine.stop)  # of a batch, this process's part
        self._network: nn.Module = network
        if peers.size > 1:
            peers.gather(None)  # nobody has failed on the way here
            self._network = DistributedDataParallel(network)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Is around the forward and the backward pass of a step; running statistics are then those after all of it.

        Dropout has masks of its own in each process.
        """
        if self._peers.size == 1:
            yield
            return
        before = self._running_statistics()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self._seed, "step", number * self._peers.size + self._peers.rank))
            yield
        self._merge_running_statistics(before)  # not sooner: the backward pass looks at them too

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Is around the steps of an epoch: an error in them ends the process, and the others notice.

        They average gradients meanwhile, and could not be told: that is another exchange.
        """
        try:
            yield
        except Exception as error:
            if self._peers.size == 1:
                raise
            raise RankError(
                f"Expected every rank to train, got {type(error).__name__} on rank {self._peers.rank} "
                f"({brief(error)}). Start the job again: it goes on after the last epoch."
            ) from error

    def __call__(self, inputs: Tensor) -> Tensor:
        """Returns the outputs for this process's part of a batch."""
        outputs: Tensor = self._network(inputs)
        return outputs

    def mean(self, value: float) -> float:
        """Returns the mean of a number over the processes."""
        return sum(self._peers.gather(value)) / self._peers.size

    def _running_statistics(self) -> Tensor:
        return torch.cat([torch.stack([norm.running_mean, norm.running_var]).flatten() for norm in self._norms])  # type: ignore[list-item]

    def _merge_running_statistics(self, before: Tensor) -> None:
        """Gives all processes the running statistics of one that had seen all mini-batches, in their order.

        A mini-batch with statistics s makes (1 − m) r + m s of a running statistic r. So k of them add to what they
        leave of it, (1 − m)^k r, an amount of their own, which those that follow shrink in turn.
        """
        (momentum,) = {norm.momentum for norm in self._norms}
        assert momentum is not None
        kept, size = (1 - momentum) ** self._num_groups, self._peers.size
        added = (self._running_statistics() - kept * before) * kept ** (size - 1 - self._peers.rank)
        dist.all_reduce(added)
        parts = (kept**size * before + added).split([2 * norm.num_features for norm in self._norms])
        for norm, part in zip(self._norms, parts, strict=True):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(part[: norm.num_features])
            norm.running_var.copy_(part[norm.num_features :])
