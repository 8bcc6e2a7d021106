"""What a model holds, to find whether anything of it changes: before and after, and from within a computation."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Fingerprint:
    """All that a model holds: every attribute of every module as an object, and every tensor by its bits."""

    def __init__(self, model: nn.Module) -> None:
        self.held = _held(model)
        self.bits = {name: (_version(tensor), bits_of(tensor).clone()) for name, tensor in _tensors(model)}

    def rebound(self, model: nn.Module) -> list[str]:
        """Names what is another object now, or was written to, even if it was then set back. Computes nothing."""
        held = _held(model)
        found = [name for name in {**self.held, **held} if self.held.get(name, self) is not held.get(name, self)]
        return found + [n for n, tensor in _tensors(model) if n in self.bits and self.bits[n][0] != _version(tensor)]

    def changes(self, model: nn.Module) -> list[str]:
        """Names what is another object now, was written to, or has other bits."""
        other = [
            n for n, tensor in _tensors(model) if n in self.bits and not torch.equal(self.bits[n][1], bits_of(tensor))
        ]
        return list(dict.fromkeys(self.rebound(model) + other))


def _held(model: nn.Module) -> dict[str, object]:
    held: dict[str, object] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            registers = value.items() if isinstance(value, dict) else [("", value)]  # of hooks, buffers, children
            held |= {f"{path}.{key}.{name}".strip("."): part for name, part in registers}
    return held


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


class Watching(TorchFunctionMode):
    """Context that looks at a model from within what others compute meanwhile, and notes what it finds changed."""

    def __init__(self, model: nn.Module, before: Fingerprint) -> None:
        super().__init__()
        self.changed: list[str] = []
        self._model, self._before = model, before
        self._calls = 0
        self._every = 1 + len(list(model.modules())) // 4  # a look takes time for each module, and so do calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._calls += 1
        if self._calls % self._every == 0:
            self.changed += self._before.rebound(self._model)
        return func(*args, **(kwargs or {}))
