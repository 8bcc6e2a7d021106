"""A captured pass against the model itself, before anything is predicted with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stochbn.inference.engine.captured import CaptureError
from stochbn.inference.engine.sampling import Drawn
from stochbn.statistics.items import fill, has_rows, map_leaves, num_examples, rows

Pass = Callable[[Drawn, Any], Tensor]  # draws × item → (S, N, …)


def verify(run_graph: Pass, run_model: Pass, item: Any, draws: Drawn) -> None:
    """Checks on three inputs and two draws, and on one of each, that a graph gives what the model gives.

    What is compared must not depend on what happens to be asked for first. So the second draw is the first with other
    numbers, and the inputs are the item's with noise. Then one input is changed: no row but its own may notice, in any
    draw. That is exact, however large or small outputs are.

    Args:
        run_graph: The captured pass.
        run_model: The model as its author meant it.
        item: A batch such as the graph is for.
        draws: At least one.

    Raises:
        CaptureError: They differ, or inputs are mixed.
    """
    item = _with_noise(rows(item, 0, 3), 3)
    two = Drawn(
        {name: torch.cat([values[:1], 1.1 * values[:1] + 0.1]) for name, values in draws.buffers.items()},
        {name: values[:1].repeat(2) for name, values in draws.shares.items()},
        torch.arange(2, device=draws.indices.device),
    )
    buffers, shares = ({name: values[:1] for name, values in part.items()} for part in (two.buffers, two.shares))
    one = Drawn(buffers, shares, two.indices[:1])
    found = run_graph(two, item)
    _compare(found, run_model(two, item))
    _compare(run_graph(one, rows(item, 0, 1)), run_model(one, rows(item, 0, 1)))
    changed = run_graph(two, _change_first(item))
    if not torch.equal(changed[:, 1:], found[:, 1:]) and not found[:, 1:].isnan().any():
        raise CaptureError("its inputs are mixed")


def _compare(found: Tensor, expected: Tensor) -> None:
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    largest = expected.nan_to_num(0, 0, 0).abs().amax((0, 1))  # of each output: some may be −1e9, say
    same = found.shape == expected.shape and (
        ((found - expected).abs() <= tolerance * (largest + expected.abs()))
        | (found == expected)
        | (found.isnan() & expected.isnan())
    )
    if not (same is not False and same.all()):
        raise CaptureError("it gives other numbers as a graph")


def _with_noise(item: Any, count: int) -> Any:
    """Repeats an item's examples until there are `count`, and adds noise to numbers, as large as they are."""
    generator = torch.Generator("cpu").manual_seed(0)

    def change(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and has_rows(leaf, count) and leaf.is_floating_point()):
            return leaf
        noise = torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf)
        size = leaf.float().std() if leaf.numel() > 1 else 0.0
        return leaf + noise * (size if size > 0 else 1.0)

    return map_leaves(change, fill(item, count))


def _change_first(item: Any) -> Any:
    """Changes the first example: numbers become others, and whole numbers those of the next example."""
    count = num_examples(item)

    def change(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and has_rows(leaf, count)):
            return leaf
        leaf = leaf.clone()
        leaf[0] = 3 * leaf[0] + 1 if leaf.is_floating_point() else leaf[1]
        return leaf

    return map_leaves(change, item)
