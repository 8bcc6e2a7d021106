"""How an item reaches a model: which model it is, where it lives, and how it is called."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stochbn.statistics.items import describe

Call = Callable[[nn.Module, Any], Any]


def call_on_item(model: nn.Module, item: Any) -> Any:
    """Passes what a loader yields: a tensor, the first of a tuple or list such as `(x, y)`, or keywords."""
    return _call(model, without_labels(item), item)


def without_labels(item: Any) -> Any:
    """Picks what the default call passes to the model out of what a loader yields."""
    return item[0] if isinstance(item, (tuple, list)) and item else item


def call_on_inputs(model: nn.Module, inputs: Any) -> Any:
    """Passes inputs given by hand: a tensor, a tuple of positional or a mapping of keyword arguments."""
    return _call(model, inputs, inputs)


def _call(model: nn.Module, arguments: Any, item: Any) -> Any:
    try:
        if isinstance(arguments, Mapping):
            return model(**arguments)
        if isinstance(arguments, tuple):
            return model(*arguments)
        return model(arguments)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        # Of a tensor, an AttributeError is the model's own fault, and so is an error of a special kind.
        if isinstance(error, AttributeError) and isinstance(arguments, Tensor):
            raise
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise
        if isinstance(error, ValueError) and "D input" not in str(error):  # which torch's layers say of missing axes
            raise
        kind = TypeError if isinstance(error, (TypeError, AttributeError)) else RuntimeError
        advice = "Pass call= to say how the model is called, as in call=lambda model, batch: model(batch['image'])."
        if kind is RuntimeError and isinstance(arguments, Tensor):
            advice = f"Pass inputs shaped as in training, a single one as x.unsqueeze(0). {advice}"
        raise kind(
            f"Expected a batch that {type(model).__name__} can take, got {describe(item)} ({error}). {advice}"
        ) from error


class Called(nn.Module):
    """Makes `call(model, item)` a forward pass, so that tensors can be swapped for it with `functional_call`."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, item: Any) -> Any:
        return self.call(self.model, item)


def unwrap(model: Any) -> nn.Module:
    """Checks that it is an eager module; of a compiled one, or one in DistributedDataParallel, returns what is inside.

    Compiled code would ignore swapped buffers. DistributedDataParallel would wait for the other processes in each
    forward pass, also in eval mode.
    """
    while (inside := without_ddp(getattr(model, "_orig_mod", model))) is not model:
        model = inside
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"Expected a model (an eager torch.nn.Module), got {type(model).__name__}. Check the order of the "
            "arguments; of a scripted model, pass the module it was scripted from."
        )
    return model


def without_ddp(model: Any) -> Any:
    """Returns what DistributedDataParallel is around, if it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def device_of(model: nn.Module) -> torch.device:
    """Finds where a model lives: the device of its first parameter or buffer, else the CPU."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")
