"""A twin: a model's modules over again, around the same tensors, to run as we like while the model stays as it is.

Modes, hooks and swapped buffers belong to the twin alone. So a model may be used, or trained, by other threads while
one of them fits or predicts with it, and an interrupted call leaves nothing behind.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


def make_twin(model: nn.Module, *, dropout: bool = False) -> nn.Module:
    """Returns a copy of a model in eval mode that shares its parameters, buffers and other tensors.

    A model that cannot be copied, because it holds a lock, say, is copied module by module; what its modules hold
    besides is then shared too.

    Args:
        model: In any mode; it is not changed.
        dropout: Put dropout layers in training mode.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> twin = make_twin(model)
        >>> twin[0].weight is model[0].weight, twin.training, model.training
        (True, False, True)
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for place in (module._parameters, module._buffers, module.__dict__):
            memo |= {id(value): value for value in place.values() if isinstance(value, Tensor)}
    try:
        twin = copy.deepcopy(model, dict(memo))
    except Exception:
        twin = _copy_modules(model, {})
    for module in twin.modules():
        module.training = dropout and isinstance(module, _DropoutNd)
    return twin


def make_snapshot(model: nn.Module) -> nn.Module:
    """Returns a twin with tensors of its own, which keeps its weights when the model is trained further."""
    twin = make_twin(model)
    copies: dict[int, Tensor] = {}
    for module in twin.modules():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for place in places:
            for name, value in place.items():
                if isinstance(value, Tensor):
                    if id(value) not in copies:
                        copied = value.detach().clone()
                        is_parameter = isinstance(value, nn.Parameter)
                        copies[id(value)] = nn.Parameter(copied, requires_grad=False) if is_parameter else copied
                    place[name] = copies[id(value)]
    return twin


def reorder_convolutions(twin: nn.Module) -> bool:
    """Gives a twin's 2-d convolutions weights of their own, channels-last, in which the CPU computes fastest.

    Activations then lie so too, which a model that looks at memory would notice. Returns whether there were any.
    """
    found = [
        module
        for module in twin.modules()
        if type(module) is nn.Conv2d and "weight" in module._parameters and module.weight.device.type == "cpu"
    ]
    for module in found:
        weight = module.weight.detach().to(memory_format=torch.channels_last)
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    return bool(found)


def _copy_modules(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in copies:
        twin = copies[module] = object.__new__(type(module))
        # Dictionaries are a module's own registers, of parameters, buffers, children and hooks.
        twin.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()})
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = _copy_modules(child, copies)
    return copies[module]
