"""A small model repository on a loopback Hub, and a cache for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, at_endpoint, model_files
from support.hub_server import HubServer, Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.fetch import download
from kimi_w4a8_eagle3.fetch.download import Repository, Snapshot


@pytest.fixture
def repo() -> Repo:
    return Repo(model_files())


@pytest.fixture
def hub(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    monkeypatch.setattr(files, "RESERVE", 0)  # the disk of the tests may be nearly full
    monkeypatch.setattr(download, "LOOK_S", 0.1)
    with serve({NAME: repo}) as server:
        at_endpoint(monkeypatch, server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def wanted(tmp_path: Path) -> Repository:
    return Repository(NAME, "main", tmp_path / "hub")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def bring(hub: HubServer, wanted: Repository, said: list[str]) -> Callable[..., Snapshot]:
    """Fetch the repository; its messages go into `said`."""
    return lambda **options: wanted.fetch(said.append, **options)
