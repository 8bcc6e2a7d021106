"""How a batch reaches a model: the default call, moving it to a device, cutting a loader into mini-batches of M."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

Call = Callable[[nn.Module, Any], Any]

# A pass holds about this many examples, draws × rows in prediction and mini-batches in fitting: fewer would waste the
# reading of weights, more would not fit the cache. Memory then depends on the batch, not on the number of draws.
STACKED_EXAMPLES = 64


def map_leaves(function: Callable[..., Any], *items: Any) -> Any:
    """Applies `function` to what stands at the same place of each item, and rebuilds the structure.

    Items are nested tuples, lists and mappings of tensors. A leaf is a tensor, anything else that is not a
    collection, or a list without tensors, such as the file names of a batch.
    """
    first = items[0]
    if isinstance(first, Mapping):
        return {key: map_leaves(function, *(item[key] for item in items)) for key in first}
    if isinstance(first, (tuple, list)) and tensors_in(first):
        parts = [map_leaves(function, *part) for part in zip(*items, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return function(*items)


def tensors_in(item: Any) -> list[Tensor]:
    """Lists the tensors of a nested item, in order."""
    if isinstance(item, Tensor):
        return [item]
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def num_examples(item: Any) -> int:
    """Reads N off an item: the leading size of its first tensor."""
    for tensor in tensors_in(item):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise TypeError(
        f"Expected a batch that holds a tensor with a leading batch dimension, got {describe(item)}. "
        "Give the loader a collate_fn that stacks examples into tensors."
    )


def rows(item: Any, start: int, stop: int) -> Any:
    """Takes some examples of an item. What has not the leading size N belongs to the batch and stays whole."""
    count = num_examples(item)
    return map_leaves(lambda leaf: leaf[start:stop] if has_rows(leaf, count) else leaf, item)


def take(item: Any, places: list[int]) -> Any:
    """Takes the examples at some places of an item."""
    count = num_examples(item)

    def pick(leaf: Any) -> Any:
        if not has_rows(leaf, count):
            return leaf
        return leaf[places] if isinstance(leaf, Tensor) else [leaf[place] for place in places]

    return item if places == list(range(count)) else map_leaves(pick, item)


def concatenate(a: Any, b: Any) -> Any:
    """Puts the examples of two items of one form together."""
    count_a, count_b = num_examples(a), num_examples(b)

    def join(leaf_a: Any, leaf_b: Any) -> Any:
        if not (has_rows(leaf_a, count_a) and has_rows(leaf_b, count_b)):
            return leaf_b
        return torch.cat([leaf_a, leaf_b]) if isinstance(leaf_a, Tensor) else leaf_a + leaf_b

    return map_leaves(join, a, b)


def fill(item: Any, size: int) -> Any:
    """Repeats an item's examples until it has `size` of them."""
    while (count := num_examples(item)) < size:
        item = concatenate(item, rows(item, 0, size - count))
    return item


def has_rows(leaf: Any, count: int) -> bool:
    """Tells whether a leaf holds something for each of `count` examples."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == count
    return isinstance(leaf, (tuple, list)) and len(leaf) == count


def widen(x: Tensor) -> Tensor:
    """Returns a tensor in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def device_of(model: nn.Module) -> torch.device:
    """Finds where a model lives: the device of its first parameter or buffer, else the CPU."""
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def copy_to(item: Any, device: torch.device) -> Any:
    """Copies an item's tensors to a device, always: a model may write into its input."""
    return map_leaves(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, item)


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


def listing(names: Iterable[str], most: int = 6) -> str:
    """Quotes names for an error message, the first few."""
    names = list(names)
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def length(loader: Iterable[Any]) -> int | None:
    """Tells how many batches there are, if the loader knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # also of a DataLoader over an IterableDataset
        return None


def check_loader(loader: Any) -> None:
    """Refuses what is likely to be meant as data but is not batches of it."""
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    is_array = isinstance(loader, (Tensor, str)) or hasattr(loader, "__array__")
    if is_dataset or is_array or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"Expected a DataLoader or another iterable of batches, got {type(loader).__name__}. Wrap data in one, "
            "for example DataLoader(dataset, batch_size=M, shuffle=True) with the batch size M of training."
        )


def check_whole(name: str, value: Any, least: int) -> int:
    """Returns a whole number of any integer type, or raises."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Expected {name} to be a whole number, got {value!r}. Pass an int.") from None
    if number < least:
        raise ValueError(f"Expected {name} of at least {least}, got {value}. Pass a larger one, or leave it out.")
    return number


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
    except (TypeError, AttributeError, RuntimeError) as error:
        # Of a tensor, an AttributeError is the model's own fault, and so is a RuntimeError of a special kind.
        if isinstance(error, AttributeError) and isinstance(arguments, Tensor):
            raise
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
            raise
        kind = RuntimeError if isinstance(error, RuntimeError) else TypeError
        raise kind(
            f"Expected a batch that {type(model).__name__} can take, got {describe(item)} ({error}). Pass call= to say "
            "how the model is called on it, for example call=lambda model, batch: model(batch['image'])."
        ) from error


class Called(nn.Module):
    """Makes `call(model, item)` a forward pass, so that tensors can be swapped for it with `functional_call`."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, item: Any) -> Any:
        return self.call(self.model, item)


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
    check_loader(loader)
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
            item = concatenate(rest, item)
            count = num_examples(item)
        groups = count // size
        if num_batches is not None:
            groups = min(groups, num_batches - produced)
        used = groups * size
        rest = rows(item, used, count) if used < count else None
        if groups:
            yield (rows(item, 0, used) if used < count else item), groups, size
            produced += groups
        if produced == num_batches:
            return
