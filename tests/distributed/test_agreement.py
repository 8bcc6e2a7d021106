"""What is the same on two ranks has the same words, and what differs has others."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

import stochbn
from stochbn.distributed.agreement import check_call, describe, digest, with_first_buffers
from stochbn.statistics.parts import ALONE, Alone


def test_equal_things_have_equal_words(model: nn.Module, stats: stochbn.Factorized) -> None:
    for value in (model, stats, [model, model], stats.sample(3, seed=0), 0.1, "last", None, partial(print, 1)):
        assert describe(value) == describe(copy.deepcopy(value))


def test_what_differs_has_other_words(model: nn.Module, stats: stochbn.Factorized) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    assert describe(other) != describe(model)
    assert describe(nn.BatchNorm1d(3)) != describe(nn.BatchNorm1d(4))
    assert describe(nn.BatchNorm1d(3)) != describe(nn.BatchNorm1d(3, track_running_stats=False))
    assert describe(stats.merge(stats)) != describe(stats)
    assert describe(stats.sample(3, seed=0)) != describe(stats.sample(3, seed=1))
    assert digest({"a": torch.zeros(2)}) != digest({"a": torch.zeros(2, dtype=torch.int32)})


def test_running_statistics_are_those_of_the_first(model: nn.Module) -> None:
    class Second(Alone):
        """A rank whose buffers are not those of the first, which are 7."""

        rank = 1

        def gather(self, value: object) -> list[object]:
            return ["another", value]

        def first(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.full_like(buffer, 7) for name, buffer in value.items()}

    before = describe(model), digest(dict(model.named_buffers()))
    (found,) = with_first_buffers([model], Second())
    assert {float(buffer.flatten()[0]) for buffer in found.buffers()} == {7.0}
    assert digest(dict(found.named_parameters())) == digest(dict(model.named_parameters()))
    assert (describe(model), digest(dict(model.named_buffers()))) == before
    assert with_first_buffers(model, ALONE) is model

    class First(Second):
        rank = 0

    assert with_first_buffers(model, First()) is model  # which is right already


def test_options_come_back_with_their_defaults(model: nn.Module) -> None:
    options = check_call(stochbn.fit, ALONE, model=model, loader=[], num_batches=3)
    assert (options["num_batches"], options["family"], options["progress"]) == (3, "factorized", True)
    assert not {"model", "loader"} & options.keys()
