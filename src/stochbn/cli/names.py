"""What the inputs and the classes of a user's data are called, so that the output can be read by people."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset


def read_classes(path: Path | None, loader: "DataLoader[Any]") -> list[str] | None:
    """Returns the names of the classes: those of a file, one a line, or those that the data set has as `classes`."""
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found = getattr(dataset, "classes", None)
    if path is not None:
        if not path.is_file():
            raise ValueError(f"Expected a file with the name of a class in each line, got no file {path}.")
        found = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not isinstance(found, (list, tuple)) or not found:
        return None
    names = [_text(name) for name in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Expected a name of its own for each class, got {twice!r} twice.")
    return names


def check_classes(names: Sequence[str] | None, num_outputs: int) -> None:
    """Refuses names that are more or fewer than a network's outputs."""
    if names is not None and len(names) != num_outputs:
        raise ValueError(
            f"Expected names of {num_outputs} classes, as many as the network has outputs, got {len(names)}."
        )


def find_ids(loader: "DataLoader[Any]") -> list[str] | None:
    """Returns what the inputs are called by their data set, in the order that the loader yields them.

    They are its `ids`, or the file names in `samples`, which torchvision's folders have.
    """
    if not isinstance(loader.sampler, SequentialSampler):
        return None  # the loader has an order of its own
    return _ids_of(loader.dataset)


def _ids_of(dataset: "Dataset[Any]") -> list[str] | None:
    if isinstance(dataset, Subset):
        whole = _ids_of(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    ids = getattr(dataset, "ids", None)
    if ids is None and (samples := getattr(dataset, "samples", None)):
        ids = [sample[0] for sample in samples if isinstance(sample, (tuple, list)) and sample]
    length = getattr(dataset, "__len__", lambda: None)()
    return [_text(each) for each in ids] if isinstance(ids, (list, tuple)) and len(ids) == length else None


def ids_in(item: Any) -> list[str]:
    """Returns what a loader yields third, after inputs and labels, if it is text or whole numbers.

    Examples:
        >>> import torch
        >>> ids_in([torch.ones(2, 4), torch.zeros(2), ("a.png", "b.png")])
        ['a.png', 'b.png']
        >>> ids_in((torch.ones(2, 4), torch.zeros(2), torch.tensor([7, 8])))
        ['7', '8']
    """
    third = item[2] if isinstance(item, (tuple, list)) and len(item) > 2 else ()
    if isinstance(third, Tensor):
        whole = third.dim() == 1 and not third.is_floating_point() and not third.is_complex()
        third = third.tolist() if whole else ()
    if not isinstance(third, (tuple, list)):
        return []
    return [_text(each) for each in third] if all(type(each) in (int, str) for each in third) else []


def _text(name: Any) -> str:
    """Returns a name that can be written; file names may be bytes that are no text."""
    return str(name).encode("utf-8", "replace").decode()
