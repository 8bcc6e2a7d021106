"""A graph → machine code, by `torch.compile`, for fixed shapes."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

MAX_CODES = 32  # of a captured pass; then the oldest goes


def first_line(error: BaseException) -> str:
    """Returns what an error says, without the details that follow."""
    return (str(error).strip() or "?").splitlines()[0]


class Code:
    """The code of some graphs, one for each shape of their arguments, compiled when it is first needed."""

    def __init__(self) -> None:
        self._codes: dict[Hashable, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def get(self, name: str, graph: GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        """Returns code for arguments such as these.

        Raises:
            RuntimeError: The compiler failed, or there is none.
        """
        key = (name, *((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments))
        with self._lock:
            if key not in self._codes:
                # From a module of its own: torch.compile keeps only a few codes for one.
                code = torch.compile(GraphModule(graph, graph.graph), dynamic=False)
                try:
                    code(*arguments)
                except Exception as error:
                    raise RuntimeError(
                        f"Expected the pass to compile, got {type(error).__name__}: {first_line(error)}. "
                        "Leave compile= off; and see that there is a C++ compiler, which it needs."
                    ) from error
                self._codes[key] = code
                if len(self._codes) > MAX_CODES:
                    del self._codes[next(iter(self._codes))]
            return self._codes[key]
