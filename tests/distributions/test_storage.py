"""Files of a header and tensors: sealed by a checksum, written whole, wherever a path leads."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stochbn.distributions import storage

HEADER = {"name": "µ", "numbers": [1, 2.5]}
TENSORS = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(3, dtype=torch.uint8), "none": torch.zeros(0, 4)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    storage.write(tmp_path / "file", "test", HEADER, TENSORS)
    return tmp_path / "file"


def test_round_trip(file: Path) -> None:
    header, tensors, has_checksum = storage.read(file, "test")
    assert header == HEADER
    assert has_checksum
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_the_same_content_gives_the_same_bytes(file: Path) -> None:
    before = file.read_bytes()
    for _ in range(10):
        storage.write(file, "test", HEADER, TENSORS)
        assert file.read_bytes() == before


def test_every_flipped_bit_is_noticed_or_does_no_harm(file: Path) -> None:
    content, num_read = file.read_bytes(), 0
    for index in range(0, 8 * len(content), 5):  # so that all bits of a byte have their turn
        flipped = bytearray(content)
        flipped[index // 8] ^= 1 << index % 8
        file.write_bytes(flipped)
        try:
            header, tensors, _ = storage.read(file, "test")
        except storage.FileError:
            continue
        num_read += 1
        assert header.items() >= HEADER.items()  # at most, "checksum" has become another word
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert num_read <= 8 * len("checksum")


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": TENSORS["a"].view(torch.int32)},
        {"a": TENSORS["a"].reshape(6)},
        {"a": TENSORS["b"], "b": TENSORS["a"]},
    ],
    ids=["type", "shape", "names"],
)
def test_the_checksum_is_of_names_types_and_shapes_too(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    header = storage.seal(HEADER, TENSORS)
    changed = {name: tensor.contiguous() for name, tensor in (TENSORS | tensors).items()}
    save_file(changed, file, {"test": json.dumps(header)})
    with pytest.raises(storage.FileError, match=r"^whose content is not what its checksum is of"):
        storage.read(file, "test")


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    save_file({"b": TENSORS["b"]}, tmp_path / "file", {"test": json.dumps(HEADER)})
    assert storage.read(tmp_path / "file", "test")[::2] == (HEADER, False)
    with pytest.raises(storage.ForeignError, match="a safetensors file of something else"):
        storage.read(tmp_path / "file", "other")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "9" * 5000, '{"a": ' * 5000])
def test_broken_header(tmp_path: Path, text: str) -> None:
    save_file({}, tmp_path / "file", {"test": text})
    with pytest.raises(storage.FileError, match=r"^with a broken header$"):
        storage.read(tmp_path / "file", "test")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would mean to wait for ever
    for name, what in (("pipe", "no regular file"), (".", "a directory")):
        with pytest.raises(storage.FileError, match=what):
            storage.read(tmp_path / name, "test")


# Where it is written


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for target in (tmp_path / "elsewhere" / "old", tmp_path / "elsewhere" / "not yet"):
        link = tmp_path / f"link to {target.name}"
        link.symlink_to(target)
        storage.write_atomically(link, b"new")
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["not yet", "old"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str, linked: bool) -> None:
    """As a device would be. The test makes no use of one: with root's rights, a failure would replace it."""
    there = tmp_path / "there"
    if kind == "pipe":
        os.mkfifo(there)
    elif kind == "socket":
        os.mknod(there, stat.S_IFSOCK | 0o600)
    else:
        there.mkdir()
    path = tmp_path / "link" if linked else there
    if linked:
        path.symlink_to(there)
    before = path.lstat(), there.lstat()
    sentence = r"^Expected a path to write a file to, got .*, which is no regular file\. Name another\.$"
    with pytest.raises(ValueError, match=sentence):
        storage.write_atomically(path, b"new")
    assert os.path.samestat(path.lstat(), before[0])
    assert os.path.samestat(there.lstat(), before[1])
    assert not [name for name in os.listdir(tmp_path) if name not in ("there", "link")]


KILLED = """
import os, signal, sys
from stochbn.distributions import storage
os.fsync = lambda _: (print("writing", flush=True), signal.pause())
storage.write_atomically(sys.argv[1], b"half")
"""


def test_what_a_killed_writer_left_is_removed_and_not_what_a_living_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    beside = {".file.backup", ".file.original", ".other.abcdefgh.tmp", ".file.abcdefg.tmp"}  # none of them is ours
    for name in beside:
        (tmp_path / name).write_bytes(b"kept")
    command = [sys.executable, "-c", KILLED, str(path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
        left = set(os.listdir(tmp_path)) - beside
        assert len(left) == 2
        writers[0].send_signal(signal.SIGKILL)
        writers[0].wait()
        storage.write_atomically(path, b"whole")
        assert len(left & set(os.listdir(tmp_path))) == 1  # of the writer that lives
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    storage.write_atomically(path, b"whole")
    assert set(os.listdir(tmp_path)) == {"file", *beside}
    assert path.read_bytes() == b"whole"


RACE = """
import sys
from stochbn.distributions import storage
for _ in range(50):
    storage.write_atomically(sys.argv[1], bytes(1000))
"""


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path / "file")]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [writer.communicate(timeout=300)[1] for writer in writers] == ["", ""]
    assert os.listdir(tmp_path) == ["file"]
