"""Convolutions channels-last, the layout in which the CPU computes fastest, where a model does not notice."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What depends on how a tensor lies in memory, and would be wrong channels-last without an error.
LAYOUT_DEPENDENT = {
    torch.as_strided,
    torch.ops.aten.as_strided,
    torch.ops.aten.as_strided.default,
    Tensor.as_strided,
    Tensor.as_strided_,
    Tensor.resize_,
    Tensor.resize_as_,
    Tensor.set_,
    Tensor.stride,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.untyped_storage,
    Tensor.data_ptr,
}


class RefusingLayouts(TorchFunctionMode):
    """Context in which calls that depend on how a tensor lies in memory raise `NotImplementedError`.

    It goes around a pass with reordered weights: such a call would give wrong numbers there, and no error.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LAYOUT_DEPENDENT:
            raise NotImplementedError(f"{func.__name__} depends on how a tensor lies in memory")
        return func(*args, **(kwargs or {}))


def channels_last_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of 2-d convolutions by name, laid out channels-last, in which the CPU computes fastest.

    They are the model's own where they lie so already. Swapped in, they make all activations channels-last.
    """
    return {
        f"{name}.weight" if name else "weight": module.weight.detach().to(memory_format=torch.channels_last)
        for name, module in model.named_modules()
        if type(module) is nn.Conv2d and "weight" in module._parameters and module.weight.device.type == "cpu"
    }
