"""A small model repository on a loopback Hub, and a folder that nothing may touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fetch_helpers import NAME, SHARDS, client, model_files, quiet
from support.hub_server import HubServer, Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.fetch.cache import Store
from kimi_w4a8_eagle3.fetch.download import Fetched, fetch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits a second before it continues a file, and writes blocks of 10 MiB: too much here.

    The file system of the tests may be nearly full.
    """
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(files, "RESERVE", 0)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)


@pytest.fixture
def repo() -> Repo:
    return Repo(model_files())


@pytest.fixture
def hub(repo: Repo) -> Iterator[HubServer]:
    with serve({NAME: repo}) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", NAME)


@pytest.fixture
def bring(hub: HubServer, store: Store) -> Callable[..., Fetched]:
    """Fetch the repository in this process."""

    def run(**options: object) -> Fetched:
        token = options.pop("token", None)
        revision = options.pop("revision", "main")
        return fetch(client(hub, token), store, NAME, revision, quiet, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def outside(tmp_path: Path, repo: Repo) -> Iterator[Path]:
    """Another user's folder. It must stay as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("bashrc", "bashrc.incomplete", "c" * 40):
        (folder / name).write_bytes(b"mine: " + name.encode())
    (folder / "shard").write_bytes(repo.files[SHARDS[0]])  # what would be right, but is not ours
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_nlink) for path in folder.iterdir()}
