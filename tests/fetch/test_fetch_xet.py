"""Files in Xet storage: hf_xet itself brings them from a storage in a folder, and what it brings is checked."""

from __future__ import annotations

from pathlib import Path

import hf_xet
import pytest
from huggingface_hub import constants
from support.fetch_helpers import NAME, SHARDS, TOKEN, content, quiet
from support.hub_server import HubServer, Repo

from kimi_w4a8_eagle3.fetch.audit import Limits
from kimi_w4a8_eagle3.fetch.cache import Store
from kimi_w4a8_eagle3.fetch.download import Fetched, fetch
from kimi_w4a8_eagle3.fetch.hub import Hub

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
def xet_hub(hub: HubServer, repo: Repo, tmp_path: Path) -> HubServer:
    """The Hub with all shards in Xet storage."""
    (tmp_path / "upload").mkdir()
    hub.xet_storage = f"local://{tmp_path / 'storage'}"
    repo.xet = uploaded(hub.xet_storage, tmp_path / "upload", {name: repo.files[name] for name in SHARDS})
    return hub


def bring(hub: HubServer, store: Store, token: str | None = None, schemes: tuple[str, ...] = ("local",)) -> Fetched:
    limits = Limits(attempts=4, first_pause=0.01, longest_pause=0.02, xet_schemes=schemes)
    return fetch(Hub(hub.endpoint, token, limits), store, NAME, "main", quiet)


def assert_whole(result: Fetched, repo: Repo) -> None:
    assert {path: (result.folder / path).read_bytes() for path in repo.files} == repo.files


def test_shards_come_by_xet_and_not_by_http(xet_hub, repo, store):
    repo.token = TOKEN
    result = bring(xet_hub, store, TOKEN)
    assert_whole(result, repo)
    assert result.without_xet == "" and not any(xet_hub.gets(path) for path in SHARDS)
    assert not store.incoming.exists()
    assert {request.authorized for request in xet_hub.log} == {True}  # the storage is a folder, so all went to the Hub


def test_other_content_in_the_storage_is_noticed_and_comes_by_http(xet_hub, repo, store, tmp_path):
    wrong = uploaded(xet_hub.xet_storage, tmp_path / "upload", {SHARD: content(77, len(repo.files[SHARD]))})
    repo.xet |= wrong
    assert_whole(bring(xet_hub, store), repo)
    assert [len(xet_hub.gets(path)) for path in SHARDS] == [1, 0, 0]


def test_a_hash_that_the_storage_does_not_have(xet_hub, repo, store):
    repo.xet[SHARD] = "0" * 64
    result = bring(xet_hub, store)
    assert_whole(result, repo)
    assert len(xet_hub.gets(SHARD)) == 1 and "RuntimeError" in result.without_xet


@pytest.mark.parametrize("address", ["local://{outside}/x", "http://127.0.0.2:9", "file:///etc", "", "x"])
def test_a_storage_at_a_strange_address_is_not_used(address, hub, repo, store, outside):
    """hf_xet would create a storage in the folder that local:// names."""
    hub.xet_storage = address.replace("{outside}", str(outside))
    repo.xet = dict.fromkeys(SHARDS, "a" * 64)
    result = bring(hub, store, schemes=Limits().xet_schemes)
    assert_whole(result, repo)
    assert "Xet storage at" in result.without_xet


def test_a_listing_with_a_xet_hash_that_is_none(hub, repo, store):
    from kimi_w4a8_eagle3.base.errors import KimiError

    repo.xet = {SHARD: "../../outside"}
    with pytest.raises(KimiError, match="is not a digest"):
        bring(hub, store)
    assert not store.root.exists()


def test_a_planted_link_is_not_followed_by_xet(xet_hub, repo, store, outside):
    store.incoming.mkdir(parents=True)
    (store.incoming / repo.digest(SHARD)).symlink_to(outside / "bashrc")
    assert_whole(bring(xet_hub, store), repo)


def test_without_xet_the_files_come_by_http_and_the_reason_is_given(xet_hub, repo, store, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    result = bring(xet_hub, store)
    assert_whole(result, repo)
    assert "HF_HUB_DISABLE_XET" in result.without_xet and all(len(xet_hub.gets(path)) == 1 for path in SHARDS)
