"""An empty cache, and archives to fill it from."""

import io
import tarfile

import pytest


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no npm, unless a test puts one there


@pytest.fixture(scope="session")
def make_archive():
    """Packs files, by name, into a gzipped tar archive."""

    def make(members: dict[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return buffer.getvalue()

    return make
