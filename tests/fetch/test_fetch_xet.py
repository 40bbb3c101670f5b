"""Files in Xet storage: hf_xet itself brings them from a storage in a folder, and what it brings is compared."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

import hf_xet
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _runtime
from support.fetch_helpers import SHARDS, TOKEN, content
from support.hub_server import HubServer, Repo

from kimi_w4a8_eagle3.fetch import hub as hub_module
from kimi_w4a8_eagle3.fetch.download import Fetched

SHARD = SHARDS[0]


def uploaded(storage: str, folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """Put files into the storage; returns their Xet hashes."""
    handles = {}
    with hf_xet.XetSession().new_upload_commit(
        endpoint=storage, token="t", token_expiry_unix_secs=4102444800
    ) as commit:
        for number, (name, data) in enumerate(files.items()):
            (folder / str(number)).write_bytes(data)
            handles[name] = commit.start_upload_file(str(folder / str(number)), sha256=hf_xet.SKIP_SHA256)
    return {name: handle.result().xet_info.hash for name, handle in handles.items()}


@pytest.fixture
def xet_hub(hub: HubServer, repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub with all shards in Xet storage."""
    (tmp_path / "upload").mkdir()
    monkeypatch.setattr(hub_module, "XET_SCHEMES", ("local",))
    hub.xet_storage = f"local://{tmp_path / 'storage'}"
    repo.xet = uploaded(hub.xet_storage, tmp_path / "upload", {name: repo.files[name] for name in SHARDS})
    return hub


def assert_whole(result: Fetched, repo: Repo) -> None:
    assert {path: (result.snapshot.folder / path).read_bytes() for path in repo.files} == repo.files


def test_shards_come_by_xet_and_not_by_http(xet_hub, repo, bring, monkeypatch):
    """Also where the first look for hf_xet takes time, in which huggingface_hub calls it absent."""
    version = importlib.metadata.version
    monkeypatch.setattr(_runtime, "_package_versions", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: (time.sleep(0.1), version(name))[1])
    repo.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = bring()
    assert_whole(result, repo)
    assert result.without_xet == "" and not any(xet_hub.gets(path) for path in SHARDS)
    assert {request.authorized for request in xet_hub.log} == {True}  # the storage is a folder, so all went to the Hub


def test_other_content_in_the_storage_is_noticed_and_comes_by_http(xet_hub, repo, bring, tmp_path):
    repo.xet |= uploaded(xet_hub.xet_storage, tmp_path / "upload", {SHARD: content(77, len(repo.files[SHARD]))})
    assert_whole(bring(), repo)
    assert [len(xet_hub.gets(path)) for path in SHARDS] == [1, 0, 0]


@pytest.mark.parametrize("hash_", ["0" * 64, "0" * 63 + "1"])
def test_a_hash_that_the_storage_does_not_have(hash_, xet_hub, repo, bring):
    repo.xet[SHARD] = hash_
    result = bring()
    assert_whole(result, repo)
    assert len(xet_hub.gets(SHARD)) == 1 and "RuntimeError" in result.without_xet


@pytest.mark.parametrize("address", ["local://{outside}/x", "http://127.0.0.2:9", "file:///etc", "", "x"])
def test_a_storage_at_a_strange_address_is_not_used(address, hub, repo, bring, tmp_path):
    """hf_xet would create a storage in the folder that local:// names."""
    hub.xet_storage = address.replace("{outside}", str(tmp_path / "outside"))
    repo.xet = dict.fromkeys(SHARDS, "a" * 64)
    result = bring()
    assert_whole(result, repo)
    assert "Xet storage at" in result.without_xet and not (tmp_path / "outside").exists()


def test_without_xet_the_files_come_by_http(xet_hub, repo, bring, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert_whole(bring(), repo)
    assert all(len(xet_hub.gets(path)) == 1 for path in SHARDS)
