"""A loader → mini-batches of M, in the order of its examples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from stochbn.statistics.items import concatenate, num_examples, rows

# A pass of fitting holds about this many examples, as many mini-batches as that makes: fewer would waste the reading of
# weights, more would not fit the cache.
STACKED_EXAMPLES = 64


def length(loader: Iterable[Any]) -> int | None:
    """Returns how many batches there are, if the loader knows; of a part of one, how many the whole has."""
    whole: int | None = getattr(loader, "whole_length", None)
    if whole is not None:
        return whole
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # also of a DataLoader over an IterableDataset
        return None


def check_loader(loader: Any) -> None:
    """Refuses what is likely to be meant as data but is not batches of it."""
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if hasattr(loader, "__array__") and not isinstance(loader, Tensor):
        raise TypeError(
            f"Expected tensors or batches of them, got {type(loader).__name__}. Pass torch.from_numpy(x), which is one "
            "batch for predict, or a DataLoader over a TensorDataset of it."
        )
    is_array = isinstance(loader, (Tensor, str))
    if is_dataset or is_array or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"Expected a DataLoader or another iterable of batches, got {type(loader).__name__}. Wrap data in one, "
            "for example DataLoader(dataset, batch_size=M, shuffle=True) with the batch size M of training."
        )


def mini_batches(
    loader: Iterable[Any],
    *,
    batch_size: int | None = None,
    num_batches: int | None = None,
    pick: Callable[[Any], Any] | None = None,
    is_slice: bool = False,
) -> Iterator[tuple[Any, int, int]]:
    """Cuts what a loader yields into mini-batches of M = `batch_size`, as many in one item as fit.

    The examples keep their order, so the mini-batches are those that a loader of batch size M would give with
    its incomplete last one dropped; what is left over of an item goes in front of the next.

    Args:
        loader: Any iterable of batches.
        batch_size: M; by default the loader's own batch size, else that of its first batch.
        num_batches: Stop after that many mini-batches; by default when the loader ends.
        pick: Picks what is needed out of what the loader yields; by default all of it is.
        is_slice: Whether others read the rest of it. Then all that is here may be the smaller last batch.

    Yields:
        `(item, count, batch_size)`: an item of `count · batch_size` examples, which are `count` mini-batches.
    """
    check_loader(loader)
    size = batch_size if batch_size is not None else getattr(loader, "batch_size", None)
    rest: Any = None
    short: int | None = None
    produced = 0
    for item in loader if pick is None else map(pick, loader):
        count = num_examples(item)
        size = count if size is None else size
        if size < 2:
            raise ValueError(
                f"Expected mini-batches of at least 2 examples, got {size}: alone in its batch, an input meets "
                "no randomness. Pass a loader or batch_size= with the batch size the model was trained with."
            )
        first_too_small = batch_size is not None and produced == 0 and count < size and not is_slice
        if short is not None or first_too_small:
            raise ValueError(
                f"Expected batches of at least {size} examples, got one of {short or count}; only the last may be "
                "smaller. Pass a loader with larger batches or a smaller batch_size=."
            )
        short = count if count < size else None
        if rest is not None:
            item = concatenate(rest, item)
            count = num_examples(item)
        whole = count // size
        if num_batches is not None:
            whole = min(whole, num_batches - produced)
        used = whole * size
        rest = rows(item, used, count) if used < count else None
        if whole:
            yield (rows(item, 0, used) if used < count else item), whole, size
            produced += whole
        if produced == num_batches:
            return
