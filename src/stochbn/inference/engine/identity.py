"""What of a model, of a call and of a batch is built into a graph: a graph serves whatever is the same in all of it."""

import types
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stochbn.inference.engine.captured import CaptureError
from stochbn.statistics.items import has_rows, num_examples, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_REGISTERS = ("_parameters", "_buffers", "_modules", "training")  # seen otherwise, or not built in
_REGISTERS_OF_HOOKS = (OrderedDict, dict, set)
_DEPTH = 5  # of containers and objects within each other


def identify_model(model: nn.Module) -> Hashable:
    """Returns the structure of a model: modules, shapes of tensors, attributes, and hooks; not the values of weights.

    Raises:
        CaptureError: It holds what cannot be compared, or modules and tensors where nobody would see them change.
    """
    modules = {id(module): number for number, module in enumerate(model.modules())}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return (
        tuple((name, type(module)) for name, module in model.named_modules(remove_duplicate=False)),
        tuple((name, t.shape, t.dtype, t.device) for name, t in tensors),
        tuple(
            (key, _identify(value, modules, _DEPTH))
            for module in model.modules()
            for key, value in vars(module).items()
            if key not in _REGISTERS
        ),
    )


def identify_call(call: Any, model: nn.Module) -> Hashable:
    """Returns what a call does, as far as it is not the model's: its code, defaults and what it closes over."""
    modules = {id(module): number for number, module in enumerate(model.modules())}
    if isinstance(call, types.FunctionType):
        cells = [cell.cell_contents for cell in call.__closure__ or ()]
        about = (*cells, *(call.__defaults__ or ()), *(call.__kwdefaults__ or {}).values())
        return id(call.__code__), tuple(_identify(value, modules, _DEPTH) for value in about)
    return _identify(call, modules, _DEPTH)


def identify_item(item: Any) -> Hashable:
    """Returns the form of a batch: structure, constants, and of tensors all but the values and the number of rows.

    Raises:
        CaptureError: It holds something for each input that is no tensor, such as file names.
    """
    count = num_examples(item)

    def identify(part: Any) -> Hashable:
        if isinstance(part, Tensor):
            trailing = part.shape[1:] if has_rows(part, count) else part.shape
            layouts = [torch.contiguous_format, *([torch.channels_last] if part.dim() == 4 else [])]
            lies = tuple(part.is_contiguous(memory_format=layout) for layout in layouts)
            return has_rows(part, count), trailing, part.dtype, lies
        if isinstance(part, Mapping):
            return tuple((key, identify(value)) for key, value in part.items())
        if isinstance(part, (tuple, list)):
            if len(part) == count and not tensors_in(part):
                raise CaptureError("its batches hold lists beside tensors")
            return (type(part), *map(identify, part))
        return _identify(part, {}, _DEPTH)

    return identify(item)


def _identify(value: Any, modules: Mapping[int, int], depth: int) -> Hashable:
    if type(value) in _REGISTERS_OF_HOOKS and not value:  # most of what there is, so it comes first
        return type(value), None
    if isinstance(value, _PLAIN):
        return type(value), value
    if id(value) in modules:
        return "module", modules[id(value)]
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and depth < _DEPTH):
        raise CaptureError(f"it holds a {type(value).__name__} that is not registered with it")
    if isinstance(value, Tensor):  # an attribute of a module: a graph keeps it, so that its id is its own
        return "tensor", id(value), value.shape, value.dtype
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return "function", id(value)
    if isinstance(value, types.MethodType):
        return "method", id(value.__func__), _identify(value.__self__, modules, depth - 1)
    if hasattr(value, "__array_interface__"):
        return "array", value.shape, str(value.dtype), hash(value.tobytes())
    if depth == 0:
        raise CaptureError(f"it holds a {type(value).__name__} too deep to be compared")
    if isinstance(value, Mapping):
        return type(value), tuple((key, _identify(part, modules, depth - 1)) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_identify(part, modules, depth - 1) for part in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_identify(part, modules, depth - 1) for part in value)
    about = getattr(value, "__dict__", None)
    if about is None:
        return type(value), repr(value)
    return type(value), tuple((key, _identify(part, modules, depth - 1)) for key, part in about.items())
