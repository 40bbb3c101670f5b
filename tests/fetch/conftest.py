"""A small model repository on a loopback Hub, and a folder that nothing may touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, client, model_files, quiet
from support.hub_server import HubServer, Repo, serve

from kimi_w4a8_eagle3.fetch.download import Result, fetch
from kimi_w4a8_eagle3.fetch.store import Store


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
def bring(hub: HubServer, store: Store) -> Callable[..., Result]:
    """Fetch the repository in this process."""

    def run(**options: object) -> Result:
        token = options.pop("token", None)
        revision = options.pop("revision", "main")
        return fetch(client(hub, token), store, NAME, revision, quiet, **({"reserve": 0} | options))  # type: ignore[arg-type]

    return run


@pytest.fixture
def outside(tmp_path: Path, repo: Repo) -> Iterator[Path]:
    """A folder of somebody else: whatever happens, it stays as it is."""
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
