"""A whole repository arrives, with digests compared and nothing asked for twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, TOKEN, at_endpoint, kimi, quiet
from support.hub_server import Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.download import Repository, fetch


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_snapshot_is_whole_and_without_a_network_huggingface_hub_finds_it(hub, repo, bring, wanted):
    from huggingface_hub import snapshot_download

    result = bring()
    assert contents(result.snapshot.folder) == repo.files
    assert Path(snapshot_download(NAME, cache_dir=wanted.cache, local_files_only=True)) == result.snapshot.folder
    assert (result.fetched, result.kept) == (sum(map(len, repo.files.values())), 0)


def test_a_second_fetch_asks_for_no_file_and_hashes_none(hub, repo, bring, wanted):
    bring()
    assert {path: len(hub.gets(path)) for path in SHARDS} == dict.fromkeys(SHARDS, 1)
    labels: list[str] = []
    again = fetch(wanted, lambda label, total: (labels.append(f"{label}: {total}"), quiet(label, total))[1])
    assert again.fetched == 0 and labels == [f"{NAME} ({len(repo.files)} files): 0"]
    assert all(len(hub.gets(path)) == 1 for path in SHARDS)


def test_a_file_that_changed_since_then_is_hashed_again_and_replaced(hub, repo, bring):
    shard = bring().snapshot.folder / SHARDS[1]
    shard.write_bytes(bytes(len(repo.files[SHARDS[1]])))  # a link: the blob gets this content
    assert bring().snapshot.verified
    assert shard.read_bytes() == repo.files[SHARDS[1]]
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 2, 1]


def test_a_blob_of_the_wrong_size_is_replaced_before_anything_is_hashed(hub, repo, bring, wanted):
    shard = bring().snapshot.folder / SHARDS[1]
    shard.write_bytes(b"cut")
    labels: list[str] = []
    again = fetch(wanted, lambda label, total: (labels.append(label), quiet(label, total))[1])
    assert again.fetched == len(repo.files[SHARDS[1]]) and labels[1:] == [f"hashing {NAME}"]
    assert shard.read_bytes() == repo.files[SHARDS[1]] and len(hub.gets(SHARDS[1])) == 2


def test_a_new_revision_fetches_only_what_changed(hub, repo, bring):
    bring()
    repo.files[SHARDS[2]] = repo.files[SHARDS[2]][::-1]
    repo.commit = "d" * 40
    result = bring()
    assert result.fetched == len(repo.files[SHARDS[2]])
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 1, 2]
    assert (result.snapshot.folder / SHARDS[2]).read_bytes() == repo.files[SHARDS[2]]


def test_pinned_commit_and_paged_listing(repo, tmp_path, monkeypatch):
    with serve({NAME: repo}, page=2) as paged:
        at_endpoint(monkeypatch, paged.endpoint)
        result = fetch(Repository(NAME, repo.commit, tmp_path), quiet)
    assert contents(result.snapshot.folder) == repo.files


def test_the_token_goes_to_the_hub_and_never_to_the_storage(hub, repo, bring, monkeypatch):
    repo.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bring()
    assert all(request.authorized for request in hub.log if request.origin == "hub")
    storage = [request for request in hub.log if request.origin == "storage"]
    assert len(storage) >= len(SHARDS)
    assert not any(request.authorized for request in storage)


def test_not_enough_space_is_said_before_any_file_is_asked_for(hub, bring, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(files, "RESERVE", 1 << 60)
        with pytest.raises(KimiError, match=r"not enough disk space: 0\.0 GB needed") as error:
            bring()
        assert "HF_HOME" in error.value.remedy and not any(hub.gets(path) for path in SHARDS)
    bring()
    monkeypatch.setattr(files, "RESERVE", 1 << 60)
    assert bring().fetched == 0  # nothing to fetch needs no space


def test_command_line_end_to_end(hub, repo, tmp_path):
    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / repo.commit
    assert str(folder) in done.stdout and f"pin this state with --revision {repo.commit}" in done.stdout
    assert "complete, every digest compared" in done.stdout and "Downloading" not in done.stderr
    assert contents(folder) == repo.files


def test_several_repositories(repo, tmp_path):
    draft = Repo({"draft.bin": bytes(2000)}, commit="a" * 40)
    with serve({NAME: repo, "org/draft": draft}) as hub:
        done = kimi(hub, tmp_path, "fetch", NAME, "org/draft")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hub/models--org--draft/snapshots" / draft.commit / "draft.bin").is_file()
    assert (tmp_path / "hub/models--org--model/snapshots" / repo.commit / SHARDS[0]).is_file()


def test_nothing_named_is_an_error_with_an_example(tmp_path):
    done = kimi("http://127.0.0.1:9", tmp_path, "fetch")
    assert done.returncode == 2 and "kimi-w4a8 fetch --recipe eagle3-opt" in done.stderr


def test_a_repository_without_files(hub, repo, bring):
    repo.files.clear()
    with pytest.raises(KimiError, match="org/model is empty at revision main"):
        bring()


def test_a_pinned_commit_is_fetched_beside_a_branch(hub, repo, wanted, bring):
    first = bring().snapshot
    repo.files["README.md"], repo.commit, repo.branches = b"new", "d" * 40, ("main", first.commit)
    assert bring().snapshot.commit == "d" * 40
    assert replace(wanted, revision=first.commit).here() == first
