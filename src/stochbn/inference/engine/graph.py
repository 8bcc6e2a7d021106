"""A model → a graph of its forward pass, captured once by `torch.export`, in eval mode and for any batch size."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Node, graph_module

from stochbn.inference.engine.captured import Captured, CaptureError
from stochbn.inference.engine.code import TRACING, first_line
from stochbn.inference.engine.dropout import DropoutSites, mark_dropout
from stochbn.inference.engine.folding import Folding
from stochbn.inference.engine.stacking import Output
from stochbn.statistics.calls import Call
from stochbn.statistics.items import fill, has_rows, map_leaves, rows, tensors_in
from stochbn.statistics.layers import all_batch_norms
from stochbn.statistics.restoring import raise_if_interrupted
from stochbn.statistics.twin import make_twin

# 0 and 1 would become constants of the graph, and a common number could be mistaken for another size.
_EXAMPLE_ROWS = 23
_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")


def capture(
    model: nn.Module, call: Call, item: Any, layers: Iterable[str], conditioned: Iterable[str] = (), *, dropout: bool
) -> Captured:
    """Captures and folds a forward pass. The model is not touched.

    Args:
        model: In any mode.
        call: How it is called on an item.
        item: A batch such as the graph is for. Trailing shapes are fixed by it, the number of inputs is not.
        layers: BatchNorm layers whose statistics are drawn.
        conditioned: Those where each input is counted into the mini-batch that normalises it.
        dropout: Whether dropout layers drop.

    Raises:
        CaptureError: The pass depends on values, has side effects, mixes inputs, or is otherwise no such graph.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise CaptureError("it has forward hooks, whose effects a graph would not have")
    twin = make_twin(model)
    norms = all_batch_norms(twin) if (names := list(layers)) else {}
    drawn = {id(buffer): name for name in names for buffer in norms[name]._buffers.values()}
    example = fill(rows(item, 0, _EXAMPLE_ROWS), _EXAMPLE_ROWS)
    with TRACING, _quiet(), torch.no_grad():
        sources = set(graph_module._loader.eval_cache)
        exported = _export(Flat(twin, call, example, dropout), example)
        try:
            return Folding(exported, drawn, frozenset(conditioned)).fold()
        except CaptureError:
            raise
        except Exception as error:
            raise_if_interrupted(error)
            raise CaptureError(f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            _forget(exported, sources)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging tracebacks of a pass that cannot be captured, which is no error."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _forget(exported: ExportedProgram, sources: set[str]) -> None:
    """Drops what torch would keep of every capture for ever, some 60 kB.

    That is source code for tracebacks, and results of calls on fake tensors: these refer to each other through C++,
    where the garbage collector cannot follow.
    """
    for name in set(graph_module._loader.eval_cache) - sources:
        graph_module._loader.eval_cache.pop(name, None)
    FakeTensorMode.cache_clear()
    for node in exported.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                size.node.shape_env.fake_tensor_cache.clear()


class Flat(nn.Module):
    """A call as a forward pass of the tensors in an item, each an argument of its own."""

    def __init__(self, twin: nn.Module, call: Call, item: Any, dropout: bool) -> None:
        super().__init__()
        self.output = Output(twin, call)
        self.item = [item]  # in a list: its tensors are no attributes of this module
        self.sites = DropoutSites(twin, mark_dropout) if dropout else None

    def forward(self, *tensors: Tensor) -> Tensor:
        if self.sites is not None:
            self.sites.begin()
        given = iter(tensors)
        item = map_leaves(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, self.item[0])
        output: Tensor = self.output(item)
        return output


def _export(flat: Flat, example: Any) -> ExportedProgram:
    tensors, batch = tensors_in(example), Dim("batch")
    shapes = tuple({0: batch} if has_rows(tensor, _EXAMPLE_ROWS) else None for tensor in tensors)
    try:
        exported = torch.export.export(flat, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
        if any(map(_writes, exported.graph.nodes)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch to itself
                exported = exported.run_decompositions({})  # the same pass, with every write made a new value
    except Exception as error:
        raise_if_interrupted(error)
        raise CaptureError(f"{type(error).__name__}: {first_line(error)}") from error
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate or any(map(_writes, exported.graph.nodes)):
        raise CaptureError("it writes into its inputs or buffers")
    return exported


def _writes(node: Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))
