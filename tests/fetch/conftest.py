"""A small model repository on a loopback Hub, and a cache for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fetch_helpers import NAME, at_endpoint, model_files, quiet
from support.hub_server import HubServer, Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.fetch import download
from kimi_w4a8_eagle3.fetch.download import Fetched, Repository, fetch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits seconds between attempts, and writes blocks of 10 MiB: too much here.

    The file system of the tests may be nearly full. A fetch whose Xet transfer fails turns Xet off for its process.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    monkeypatch.setattr(files, "RESERVE", 0)
    monkeypatch.setattr(download, "PAUSE", 0)
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", constants.HF_HUB_DISABLE_XET)


@pytest.fixture
def repo() -> Repo:
    return Repo(model_files())


@pytest.fixture
def hub(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    from huggingface_hub import constants

    with serve({NAME: repo}) as server:
        at_endpoint(monkeypatch, server.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


@pytest.fixture
def wanted(tmp_path: Path) -> Repository:
    return Repository(NAME, "main", tmp_path / "hub")


@pytest.fixture
def bring(hub: HubServer, wanted: Repository) -> Callable[..., Fetched]:
    """Fetch the repository in this process."""
    return lambda **options: fetch(wanted, quiet, **options)
