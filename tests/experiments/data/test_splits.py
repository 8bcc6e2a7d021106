import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stochbn.experiments.data.embedded import load_digits
from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import Blob, DataError, cache_dir, write_atomically
from stochbn.experiments.data.splits import decode_idx, draw_known_classes, list_data, load_split, to_inputs

USER_CACHE = cache_dir()  # before any test points it elsewhere
SHARED = Path(__file__).parents[3] / ".." / "shared" / "data"


def test_idx_of_images_is_decoded_in_row_order():
    header = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3])
    assert decode_idx(header + bytes(range(12))).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "unsigned bytes, got one that begins ''"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "begins '00 00 0d 01'"),
        (bytes([1, 0, 8, 1, 0, 0, 0, 1, 5]), "begins '01 00 08 01'"),
        (bytes([0, 0, 8, 0, 5]), "begins '00 00 08 00'"),
        (bytes([0, 0, 8, 3, 0, 0, 0, 1]), "header of 16 bytes, got 8"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), r"shape \(3,\), got 2 values"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]), r"shape \(1,\), got 2 values"),
        (bytes([0, 0, 8, 2, 255, 255, 255, 255, 255, 255, 255, 255]), "got 0 values"),
    ],
)
def test_bad_idx_is_refused(content, message):
    with pytest.raises(DataError, match=message):
        decode_idx(content)


def test_inputs_are_pixels_in_0_1():
    images = torch.arange(256, dtype=torch.uint8)
    inputs = to_inputs(images)
    assert inputs.dtype == torch.float32
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert images.dtype == torch.uint8


def test_digit_parts_are_disjoint_and_complete():
    parts = [load_split("digits", part) for part in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [1200, 200, 397]
    seen = sorted(image.tobytes() for part in parts for image in part.images.numpy())
    assert seen == sorted(image.tobytes() for image in load_digits()[0].numpy())


def test_out_of_domain_part_of_digits_is_glyphs():
    split = load_split("digits", "out-of-domain")
    assert (split.name, len(split), split.classes) == ("glyphs", 1000, tuple("ABCDEFGHIJ"))
    assert torch.equal(split.images, load_split("glyphs", "test").images)


@pytest.mark.parametrize(
    ("data", "part"), [("glyphs", "train"), ("cifar10", "out-of-domain"), ("mnistt", "test"), ("digits", "dev")]
)
def test_unknown_data_or_part_is_refused(data, part):
    with pytest.raises(DataError, match=rf"Expected a part of mnist, .*; got '{part}' of '{data}'"):
        load_split(data, part)


def test_known_classes_are_five_and_determined_by_the_seed():
    assert draw_known_classes() == (0, 1, 2, 3, 4)
    drawn = [draw_known_classes(seed) for seed in range(20)]
    assert drawn == [draw_known_classes(seed) for seed in range(20)]
    assert all(len(set(classes)) == 5 and tuple(sorted(classes)) == classes for classes in drawn)
    assert len(set(drawn)) > 10


def test_embedded_data_is_always_there_and_an_empty_cache_has_nothing_else():
    ready = [name for name, present in list_data().items() if present]
    assert ready == ["digits", "glyphs"]
    assert not cache_dir().exists()


@pytest.fixture
def fake_cifar10(monkeypatch):
    """Noise in the place of CIFAR-10, 7,000 images whose first value is their label."""
    random = np.random.default_rng(0)
    contents = {}
    for part, number in (("train", 6000), ("test", 1000)):
        labels = (np.arange(number) % 10).astype(np.uint8)
        images = random.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
        images[:, 0, 0, 0] = labels
        contents |= {f"{part}-images": images.tobytes(), f"{part}-labels": labels.tobytes()}
    blobs = [Blob(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()]
    fake = replace(PUBLICATIONS["cifar10"], blobs=tuple(blobs))
    monkeypatch.setitem(PUBLICATIONS, "cifar10", fake)
    for name, content in contents.items():
        write_atomically(cache_dir() / "cifar10" / name, content)


@pytest.mark.parametrize("class_seed", [None, 1])
@pytest.mark.usefixtures("fake_cifar10")
def test_cifar5_keeps_known_classes_and_hides_the_others(class_seed):
    known = draw_known_classes(class_seed)
    parts = {
        part: load_split("cifar5", part, class_seed=class_seed)
        for part in ("train", "validation", "test", "out-of-domain")
    }
    assert len(parts["train"]) + len(parts["validation"]) == 3000
    assert len(parts["test"]) == len(parts["out-of-domain"]) == 500
    for part, split in parts.items():
        kept = sorted(set(range(10)) - set(known)) if part == "out-of-domain" else known
        assert split.images.shape[1:] == (3, 32, 32)
        assert split.images[:, 0, 0, 0].tolist() == [kept[label] for label in split.labels.tolist()]
        assert len(split.classes) == 5
    if class_seed is None:
        assert parts["out-of-domain"].classes == ("dog", "frog", "horse", "ship", "truck")


@pytest.mark.usefixtures("fake_cifar10")
def test_cifar10_parts_are_disjoint():
    train, validation = load_split("cifar10", "train"), load_split("cifar10", "validation")
    assert (len(train), len(validation)) == (1000, 5000)
    images = {image.tobytes() for split in (train, validation) for image in split.images.numpy()}
    assert len(images) == 6000


@pytest.mark.skipif(not (SHARED / "notmnist").is_dir(), reason="notMNIST is not beside the repository")
def test_notmnist_from_a_folder():
    split = load_split("notmnist", "test", folder=SHARED)
    assert split.images.shape == (10_000, 1, 28, 28)
    assert split.labels.bincount().tolist() == [1000] * 10


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_real_data_where_the_user_has_it(data, monkeypatch):
    if not (USER_CACHE / data).is_dir():
        pytest.skip(f"{data} is not in the user's cache")
    monkeypatch.setenv("STOCHBN_DATA", str(USER_CACHE))
    split = load_split(data, "validation")
    assert len(split) == 5000
    assert split.labels.bincount().shape == (10,)
