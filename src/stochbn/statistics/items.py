"""Items, what a loader yields: nested tuples, lists and mappings of tensors, handled by their examples."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


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
    """Reads N ≥ 1 off an item: the leading size of its first tensor that has one other than 1.

    A leading size of 1 may be that of one value for all inputs, whatever the order.
    """
    sizes = [tensor.shape[0] for tensor in tensors_in(item) if tensor.dim() > 0]
    if not sizes:
        raise TypeError(
            f"Expected a batch that holds a tensor with a leading batch dimension, got {describe(item)}. "
            "Give the loader a collate_fn that stacks examples into tensors."
        )
    count = next((size for size in sizes if size != 1), 1)
    if count == 0:
        raise ValueError("Expected at least one input, got an empty batch. Leave empty batches out.")
    return count


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
    """Returns whether a leaf holds something for each of `count` examples."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == count
    return isinstance(leaf, (tuple, list)) and len(leaf) == count


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
