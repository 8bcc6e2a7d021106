"""How a batch reaches a model: the default call, moving it to a device, cutting a loader into mini-batches of M."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[nn.Module, Any], Any]


def map_tensors(function: Callable[..., Any], *items: Any) -> Any:
    """Applies `function` to the tensors at the same place of each item; anything else is kept from the first.

    Items are tensors or nested tuples, lists and mappings of them.
    """
    first = items[0]
    if isinstance(first, Tensor):
        return function(*items)
    if isinstance(first, Mapping):
        return {key: map_tensors(function, *(item[key] for item in items)) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [map_tensors(function, *part) for part in zip(*items, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def tensors_in(item: Any) -> list[Tensor]:
    """Lists the tensors of a nested item, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, item)
    return found


def num_examples(item: Any) -> int:
    """Reads N off an item: the leading size of its first tensor."""
    for tensor in tensors_in(item):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise TypeError(
        f"Expected a batch that holds a tensor with a leading batch dimension, got {describe(item)}. "
        "Give the loader a collate_fn that stacks examples into tensors."
    )


def device_of(model: nn.Module) -> torch.device:
    """Finds where a model lives: the device of its first parameter or buffer, else the CPU."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def to_device(item: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), item)


def describe(item: Any) -> str:
    """Names the structure of an item for an error message, as in `tuple(Tensor[16, 3], str)`."""
    kind = type(item).__name__
    if isinstance(item, Tensor):
        return f"{kind}{list(item.shape)}"
    if isinstance(item, Mapping):
        return f"{kind}({', '.join(f'{key}={describe(part)}' for key, part in item.items())})"
    if isinstance(item, (tuple, list)):
        shown = ", ".join(describe(part) for part in item[:4])
        return f"{kind}({shown}{', …' if len(item) > 4 else ''})"
    return kind


def call_on_item(model: nn.Module, item: Any) -> Any:
    """Passes what a loader yields: a tensor, the first of a tuple or list such as `(x, y)`, or keywords."""
    return _call(model, item[0] if isinstance(item, (tuple, list)) and item else item, item)


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
    except (TypeError, AttributeError) as error:
        if isinstance(arguments, Tensor) and isinstance(error, AttributeError):
            raise  # a fault of the model's own
        raise TypeError(
            f"Expected a batch that {type(model).__name__} can take, got {describe(item)} ({error}). Pass call= to say "
            "how the model is called on it, for example call=lambda model, batch: model(batch['image'])."
        ) from error


def mini_batches(
    loader: Iterable[Any], *, batch_size: int | None = None, num_batches: int | None = None
) -> Iterator[tuple[Any, int, int]]:
    """Cuts what a loader yields into mini-batches of M = `batch_size`, as many in one item as fit.

    The examples keep their order, so the mini-batches are those that a loader of batch size M would give with
    its incomplete last one dropped; what is left over of an item goes in front of the next.

    Args:
        loader: Any iterable of batches.
        batch_size: M; by default the loader's own batch size, else that of its first batch.
        num_batches: Stop after that many mini-batches; by default when the loader ends.

    Yields:
        `(item, groups, batch_size)`: an item of `groups · batch_size` examples.
    """
    size = batch_size if batch_size is not None else getattr(loader, "batch_size", None)
    rest: Any = None
    short: int | None = None
    produced = 0
    for item in loader:
        count = num_examples(item)
        size = count if size is None else size
        if size < 2:
            raise ValueError(
                f"Expected mini-batches of at least 2 examples, got {size}: alone in its batch, an input meets "
                "no randomness. Pass a loader or batch_size= with the batch size the model was trained with."
            )
        first_too_small = batch_size is not None and produced == 0 and count < size
        if short is not None or first_too_small:
            raise ValueError(
                f"Expected batches of at least {size} examples, got one of {short or count}; only the last may be "
                "smaller. Pass a loader with larger batches or a smaller batch_size=."
            )
        short = count if count < size else None
        if rest is not None:
            item = map_tensors(lambda a, b: torch.cat([a, b]) if a.dim() else b, rest, item)
            count += num_examples(rest)
        groups = count // size
        if num_batches is not None:
            groups = min(groups, num_batches - produced)
        used = groups * size
        rest = _rows(item, used, count, count) if used < count else None
        if groups:
            yield (_rows(item, 0, used, count) if used < count else item), groups, size
            produced += groups
        if produced == num_batches:
            return


def _rows(item: Any, start: int, stop: int, count: int) -> Any:
    return map_tensors(lambda t: t[start:stop] if t.dim() and t.shape[0] == count else t, item)
