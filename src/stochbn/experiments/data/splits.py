"""Data sets as tensors, by name and part: MNIST, notMNIST, CIFAR-10, CIFAR5, and the embedded pair.

    train = load_split("mnist", "train")

The validation part is held out of the training data by a split that never changes, whatever seed a network is
trained with. Everything that is chosen is chosen on it; test data is only ever reported. The out-of-domain
part is what the paper sets against a data set.
"""

import gzip
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stochbn.experiments.data.embedded import LETTERS, load_digits, render_glyphs
from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import DataError, fetch, is_cached

Part = Literal["train", "validation", "test", "out-of-domain"]

_SPLIT_SEED = 1802  # of whatever is held out; unrelated to any training seed
_NUM_VALIDATION = {"mnist": 5000, "cifar10": 5000, "digits": 200}
_OUT_OF_DOMAIN = {"mnist": "notmnist", "digits": "glyphs"}
_NUM_TEST_DIGITS = 397
_DIGITS = tuple("0123456789")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Split:
    """Images `(N, C, H, W)`, uint8, and labels `(N,)`, int64, that index into the names of the classes.

    A slice or a tensor of indices takes some of the images with their labels.

    Examples:
        >>> split = load_split("digits", "test")
        >>> len(split), split.images.shape, split.classes[:3]
        (397, torch.Size([397, 1, 28, 28]), ('0', '1', '2'))
        >>> len(split[:20])
        20
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | Tensor) -> "Split":
        return replace(self, images=self.images[index], labels=self.labels[index])


def load_split(data: str, part: Part, *, folder: Path | None = None, class_seed: int | None = None) -> Split:
    """Loads one part of a data set; what is published elsewhere is fetched into the cache the first time.

    | data       | train  | validation | test   | out-of-domain                              |
    | ---------- | ------ | ---------- | ------ | ------------------------------------------ |
    | `mnist`    | 55,000 | 5,000      | 10,000 | notMNIST: 10,000 letters                   |
    | `cifar10`  | 45,000 | 5,000      | 10,000 |                                            |
    | `cifar5`   | those of five known classes  ||| test images of the other five: 5,000       |
    | `digits`   | 1,200  | 200        | 397    | glyphs: 1,000 letters                      |
    | `notmnist` |        |            | 10,000 |                                            |
    | `glyphs`   |        |            | 1,000  |                                            |

    Args:
        data: Name of the data set.
        part: Which part of it.
        folder: Where you keep the published files, tried before any download.
        class_seed: Draws the five known classes of `cifar5`; None takes the first five, as the authors' code does.

    Raises:
        DataError: No source has the data, or the data set has no such part.
    """
    if part == "out-of-domain" and data in _OUT_OF_DOMAIN:
        return load_split(_OUT_OF_DOMAIN[data], "test", folder=folder)
    if data == "cifar5":
        whole = load_split("cifar10", "test" if part == "out-of-domain" else part, folder=folder)
        known = draw_known_classes(class_seed)
        hidden = tuple(sorted(set(range(10)) - set(known)))
        return _keep_classes(whole, hidden if part == "out-of-domain" else known)
    if part == "test" and data in _LOADERS:
        return _LOADERS[data](False, folder)
    if part in ("train", "validation") and data in _NUM_VALIDATION:
        whole = _LOADERS[data](True, folder)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        held_out, rest = order.split([_NUM_VALIDATION[data], len(whole) - _NUM_VALIDATION[data]])
        return whole[(held_out if part == "validation" else rest).sort().values]
    raise DataError(f"Expected a part of {', '.join(list_data())}; got {part!r} of {data!r}.")


def draw_known_classes(seed: int | None = None) -> tuple[int, ...]:
    """Returns which five of CIFAR-10's classes are known: the first five, or five drawn by a seed.

    Examples:
        >>> draw_known_classes()
        (0, 1, 2, 3, 4)
    """
    if seed is None:
        return tuple(range(5))
    return tuple(sorted(torch.randperm(10, generator=torch.Generator().manual_seed(seed))[:5].tolist()))


def list_data() -> dict[str, bool]:
    """Returns the name of each data set and whether it can be loaded without a download. Changes nothing."""
    ready = {name: is_cached(publication) for name, publication in PUBLICATIONS.items()}
    return {**ready, "cifar5": ready["cifar10"], "digits": True, "glyphs": True}


def to_inputs(images: Tensor) -> Tensor:
    """Turns uint8 pixels into what a network takes: float32 in [0, 1]. Changes nothing.

    Examples:
        >>> to_inputs(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float().div_(255)


def decode_idx(content: bytes) -> Tensor:
    """Decodes an idx file of unsigned bytes: two zeros, type 8, the number of dimensions, each size, the values.

    Examples:
        >>> decode_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        tensor([7, 8, 9], dtype=torch.uint8)
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4:
        raise DataError(f"Expected an idx file of unsigned bytes, got one that begins {content[:4].hex(' ')!r}.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"Expected an idx header of {start} bytes, got {len(content)}.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(f"Expected an idx file of shape {shape}, got {len(content) - start} values.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _load_mnist(train: bool, folder: Path | None) -> Split:
    files = fetch(PUBLICATIONS["mnist"], folder=folder)
    stem = "train" if train else "t10k"
    images = decode_idx(files[f"{stem}-images-idx3-ubyte"])[:, None]  # (N, 1, 28, 28)
    return Split("mnist", images, decode_idx(files[f"{stem}-labels-idx1-ubyte"]).long(), _DIGITS)


def _load_notmnist(train: bool, folder: Path | None) -> Split:
    files = fetch(PUBLICATIONS["notmnist"], folder=folder)
    images = decode_idx(gzip.decompress(files["t10k-images-idx3-ubyte.gz"]))[:, None]  # (N, 1, 28, 28)
    labels = decode_idx(gzip.decompress(files["t10k-labels-idx1-ubyte.gz"])).long()
    return Split("notmnist", images, labels, LETTERS)


def _load_cifar10(train: bool, folder: Path | None) -> Split:
    files = fetch(PUBLICATIONS["cifar10"], folder=folder)
    stem = "train" if train else "test"
    pixels = np.frombuffer(files[f"{stem}-images"], np.uint8).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    labels = np.frombuffer(files[f"{stem}-labels"], np.uint8).astype(np.int64)
    images = torch.from_numpy(np.ascontiguousarray(pixels))  # (N, 3, 32, 32)
    return Split("cifar10", images, torch.from_numpy(labels), _OBJECTS)


def _load_digits(train: bool, folder: Path | None) -> Split:
    whole = Split("digits", *load_digits(), _DIGITS)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    return whole[order[_NUM_TEST_DIGITS:] if train else order[:_NUM_TEST_DIGITS]]


def _load_glyphs(train: bool, folder: Path | None) -> Split:
    return Split("glyphs", *render_glyphs(), LETTERS)


_LOADERS = {
    "mnist": _load_mnist,
    "notmnist": _load_notmnist,
    "cifar10": _load_cifar10,
    "digits": _load_digits,
    "glyphs": _load_glyphs,
}


def _keep_classes(split: Split, kept: Sequence[int]) -> Split:
    """Keeps the images of some classes, and numbers these classes from 0."""
    part = split[torch.isin(split.labels, torch.tensor(kept)).nonzero()[:, 0]]
    labels = torch.searchsorted(torch.tensor(kept), part.labels)
    return Split("cifar5", part.images, labels, tuple(split.classes[index] for index in kept))
