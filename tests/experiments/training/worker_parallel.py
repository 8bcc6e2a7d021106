"""What two ranks find that train one network together."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from jobs import TIMEOUT, run
from stochbn.distributed.ranks import RankError, Ranks, together
from stochbn.experiments.training import train as training
from stochbn.experiments.training.checkpoints import read_checkpoint
from stochbn.experiments.training.recipes import RECIPES, Recipe
from stochbn.experiments.training.train import train
from stochbn.statistics.parts import ALONE


def make_recipe(**changes: Any) -> Recipe:
    return RECIPES["digits"].vary(epochs=2, batch_size=64, ghost_size=16).vary(**changes)


def train_both_ways(recipe: Recipe, folder: Path, rank: int) -> list[Any]:
    """Trains with both processes, and then with rank 0 alone; returns both checkpoints on rank 0."""
    found = []
    for name, peers in (("together", Ranks(None, "train")), ("alone", ALONE)):
        os.environ["STOCHBN_DATA"] = str(folder / name)
        if peers is not ALONE or rank == 0:
            found.append(train(recipe, 0, peers=peers))
    dist.barrier()
    return [read_checkpoint(path) for path in found] if rank == 0 else []


def check_training_is_that_of_one_process(rank: int, folder: Path) -> None:
    for recipe in (make_recipe(), make_recipe(optimizer="sgd")):
        found = train_both_ways(recipe, folder, rank)
        if rank == 0:
            compare(*found)


def compare(found: Any, expected: Any) -> None:
    assert found.finished
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for key in ("train_loss", "validation_nll"):
        assert [record[key] for record in found.history] == pytest.approx([r[key] for r in expected.history], rel=1e-3)


def check_dropout_trains_too(rank: int, folder: Path) -> None:
    os.environ["STOCHBN_DATA"] = str(folder / "dropout")
    recipe = RECIPES["digits-dropout"].vary(epochs=1, batch_size=64, ghost_size=16)
    path = train(recipe, 0, peers=Ranks(None, "train"))
    assert read_checkpoint(path).finished
    dist.barrier()


def check_mini_batches_stay_whole(rank: int, folder: Path) -> None:
    os.environ["STOCHBN_DATA"] = str(folder / "refused")
    with pytest.raises(ValueError, match="whole mini-batches of M = 16 for each of 2 processes, got 16 images"):
        train(RECIPES["digits"], 0, peers=Ranks(None, "train"))
    # The remedy works.
    train(RECIPES["digits"].vary(epochs=1, batch_size=32, ghost_size=16), 0, peers=Ranks(None, "train"))
    dist.barrier()


def check_a_checkpoint_that_cannot_be_written(rank: int, folder: Path) -> None:
    os.environ["STOCHBN_DATA"] = str(folder / "unwritten")
    kind, message = (OSError, "disk full") if rank == 0 else (RankError, "error on rank 0: OSError: disk full")
    start = time.monotonic()
    with (
        mock.patch.object(training, "write_checkpoint", side_effect=OSError("disk full")),
        pytest.raises(kind, match=message),
        together(None, "train"),
    ):
        train(make_recipe(), 0, peers=Ranks(None, "train"))
    assert time.monotonic() - start < TIMEOUT / 2
    assert Ranks(None, "train").gather(rank) == [0, 1]  # nobody is out of step


def check_a_rank_that_fails_among_steps(rank: int, folder: Path) -> None:
    """The last check: what the ranks have sent each other is then out of step."""
    os.environ["STOCHBN_DATA"] = str(folder / "failing")
    if rank == 1:
        training.resize = lambda *_: 1 / 0  # outside of a step, where the others wait for its gradients
        with pytest.raises(RankError, match="got ZeroDivisionError on rank 1"):
            train(make_recipe(), 0, peers=Ranks(None, "train"))
        return  # the process ends
    with pytest.raises(RankError, match="Expected every rank to train, got RuntimeError on rank 0"), together(None, ""):
        train(make_recipe(), 0, peers=Ranks(None, "train"))
    assert not list((folder / "failing").rglob("*.safetensors*"))


if __name__ == "__main__":
    run(globals())
