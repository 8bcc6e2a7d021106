"""A stacked pass → machine code, by `torch.compile`, for fixed shapes.

The pass is traced to a graph, which is cut in two: what does not depend on the draws, and what does. So here, too, the
shared part of a batch is computed once. Weights are inputs of the code, not constants in it: it follows the model when
that is trained further. The code is kept with the model and serves all later calls of the same kind.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module


class CompiledPass:
    """Code for `function(*fixed, *drawn)`, which must be pure.

    Args:
        function: The pass.
        fixed: Tensors that are the same in all passes over a batch.
        drawn: Tensors that differ from draw to draw.
    """

    def __init__(self, function: Callable[..., Tensor], fixed: Sequence[Tensor], drawn: Sequence[Tensor]) -> None:
        traced = make_fx(function)(*fixed, *drawn)
        inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
        dependent = set(inputs[len(fixed) :])
        for node in traced.graph.nodes:
            if _is_random(node) or not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
        self._whole = split_module(traced, traced, lambda node: int(node in dependent))
        self._shared: _Once | None = None
        for name, part in list(self._whole.named_children()):
            code = torch.compile(part, dynamic=False)
            if name == "submod_0":
                code = self._shared = _Once(code)
            setattr(self._whole, name, code)

    def begin(self) -> None:
        """Forgets what the passes over the last batch shared."""
        if self._shared is not None:
            self._shared.result = None

    def __call__(self, fixed: Sequence[Tensor], drawn: Sequence[Tensor]) -> Tensor:
        output: Tensor = self._whole(*fixed, *drawn)
        return output


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def fingerprint(model: nn.Module) -> Hashable:
    """Returns what of a model is compiled in, as far as can be seen: its structure, and plain attributes of modules."""
    plain = (bool, int, float, str, type(None))
    return repr(model), tuple(
        (key, value)
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, plain) and key != "training"
    )


class _Once(nn.Module):
    """A part that is computed for the first pass and remembered for the others."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code = code
        self.result: Any = None

    def forward(self, *args: Tensor) -> Any:
        if self.result is None:
            self.result = self.code(*args)
        return self.result


MAX_CODES = 32  # of a model; then the oldest goes

_CODE: "WeakKeyDictionary[nn.Module, dict[Hashable, CompiledPass]]" = WeakKeyDictionary()


def compiled_pass(
    model: nn.Module,
    kind: Hashable,
    function: Callable[..., Tensor],
    fixed: Sequence[Tensor],
    drawn: Sequence[Tensor],
) -> CompiledPass:
    """Returns the code for a kind of pass through a model, compiled when it is first asked for."""
    codes = _CODE.setdefault(model, {})
    kind = (kind, *((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (*fixed, *drawn)))
    if kind not in codes:
        versions = [tensor._version for tensor in fixed]
        try:
            code = CompiledPass(function, fixed, drawn)
            code(fixed, drawn)
            if versions != [tensor._version for tensor in fixed]:
                raise NotImplementedError("it writes into its inputs or buffers")
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise RuntimeError(
                f"Expected {type(model).__name__} to compile, got {type(error).__name__}: {reason}. "
                "Leave compile= off; and see that there is a C++ compiler, which it needs."
            ) from error
        codes[kind] = code
        if len(codes) > MAX_CODES:
            del codes[next(iter(codes))]
    return codes[kind]
