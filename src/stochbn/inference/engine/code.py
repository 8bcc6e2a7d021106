"""A graph → machine code, by torch's inductor, for fixed shapes."""

import copy
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from stochbn.statistics.restoring import raise_if_interrupted

MAX_CODES = 32  # of a captured pass; then the oldest goes
TRACING = threading.RLock()  # torch.export and torch.compile keep state in globals, which a second thread would spoil


def first_line(error: BaseException) -> str:
    """Returns what an error says, without the details that follow."""
    return (str(error).strip() or "?").splitlines()[0]


class Code:
    """The code of some graphs, one for each shape of their arguments, compiled when it is first needed."""

    def __init__(self) -> None:
        self._codes: dict[Hashable, Callable[..., Any]] = {}

    def get(self, name: str, graph: GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        """Returns code for arguments such as these.

        Raises:
            RuntimeError: The compiler failed, or there is none.
        """
        key = (name, *((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        code = self._codes.get(key)
        if code is None:
            with TRACING:
                code = self._codes[key] = _compile(graph, arguments)
                if len(self._codes) > MAX_CODES:
                    del self._codes[next(iter(self._codes))]
        return code


def _compile(graph: GraphModule, arguments: list[Any]) -> Callable[..., Any]:
    """Compiles without torch.compile's front end: nothing is left to trace, and no guard to be checked at each call."""
    copied = copy.deepcopy(graph)
    places = [node for node in copied.graph.nodes if node.op == "placeholder"]
    fixed = {node: value for node, value in zip(places, arguments, strict=True) if not isinstance(value, Tensor)}

    def fix(node: Node) -> Any:
        return fixed.get(node, node)

    for node in copied.graph.nodes:  # counts, and None, become constants
        node.args, node.kwargs = map_arg(node.args, fix), map_arg(node.kwargs, fix)
    for node in fixed:
        copied.graph.erase_node(node)
    copied.recompile()
    tensors: list[Any] = [value for value in arguments if isinstance(value, Tensor)]
    try:
        code: Callable[..., Any] = torch._inductor.compile(copied, tensors)
        code(*tensors)
    except Exception as error:
        raise_if_interrupted(error)
        raise RuntimeError(
            f"Expected the pass to compile, got {type(error).__name__}: {first_line(error)}. "
            "Leave compile= off; and see that there is a C++ compiler, which it needs."
        ) from error
    return lambda *values: code(*(value for value in values if isinstance(value, Tensor)))
