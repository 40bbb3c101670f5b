"""A whole repository arrives, with digests checked and nothing asked for twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, TOKEN, client, kimi, quiet
from support.hub_server import Fault, Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.download import fetch


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if ".kimi" not in path.parts[-3:]}


def test_cache_layout_is_the_one_huggingface_hub_reads(hub, repo, bring, store):
    from huggingface_hub import snapshot_download

    result = bring()
    assert contents(result.folder) == repo.files
    # The library itself, without a network, by branch name: it would raise if anything were missing.
    assert Path(snapshot_download(NAME, cache_dir=store.cache, local_files_only=True)) == result.folder
    assert (result.fetched, result.kept) == (sum(map(len, repo.files.values())), 0)


def test_each_file_is_asked_for_once_and_a_second_fetch_asks_for_none(hub, repo, bring):
    bring()
    assert {path: len(hub.gets(path)) for path in repo.files if repo.files[path]} == {
        path: 1 for path in repo.files if repo.files[path]
    }
    assert bring().fetched == 0
    assert all(len(hub.gets(path)) == 1 for path in SHARDS)


def test_a_wrong_blob_of_the_right_size_is_replaced(hub, repo, bring, store):
    """Size alone must not count as 'already here'."""
    blobs = store.root / "blobs"
    blobs.mkdir(parents=True)
    (blobs / repo.digest(SHARDS[0])).write_bytes(bytes(len(repo.files[SHARDS[0]])))
    (blobs / repo.digest(SHARDS[1])).write_bytes(repo.files[SHARDS[1]])
    folder = bring().folder
    assert (folder / SHARDS[0]).read_bytes() == repo.files[SHARDS[0]]
    assert not hub.gets(SHARDS[1])  # right content: kept, not fetched


def test_a_new_revision_fetches_only_what_changed(hub, repo, bring):
    bring()
    repo.files[SHARDS[2]] = repo.files[SHARDS[2]][::-1]
    repo.commit = "d" * 40
    folder = bring().folder
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 1, 2]
    assert (folder / SHARDS[2]).read_bytes() == repo.files[SHARDS[2]]


def test_pinned_commit_and_paged_listing(repo, bring, store):
    with serve({NAME: repo}, page=2) as paged:
        result = fetch(client(paged), store, NAME, repo.commit, quiet)
    assert {file.path for file in result.listing.files} == set(repo.files)
    assert contents(result.folder) == repo.files


def test_the_token_goes_to_the_hub_and_never_to_the_storage(hub, repo, bring):
    repo.token = TOKEN
    bring(token=TOKEN)
    assert all(request.authorized for request in hub.log if request.origin == "hub")
    storage = [request for request in hub.log if request.origin == "storage"]
    assert len(storage) >= len(SHARDS)
    assert not any(request.authorized for request in storage)


def test_not_enough_space_is_said_before_any_file_is_asked_for(hub, bring, monkeypatch):
    monkeypatch.setattr(files, "RESERVE", 1 << 60)
    with pytest.raises(KimiError, match=r"not enough disk space: 0\.0 GB needed") as error:
        bring()
    assert "HF_HOME" in error.value.remedy and not any(hub.gets(path) for path in SHARDS)


def test_nothing_to_fetch_needs_no_space(hub, bring, monkeypatch):
    bring()
    monkeypatch.setattr(files, "RESERVE", 1 << 60)
    assert bring().fetched == 0


def test_two_fetches_of_one_repository_do_not_mix(hub, bring, store):
    with store.exclusive(), pytest.raises(KimiError, match="another `kimi-w4a8 fetch`"):
        bring()


def test_a_path_that_leaves_the_directory_is_refused(hub, repo, bring, tmp_path):
    repo.files["../escape.txt"] = b"x"
    with pytest.raises(KimiError, match="not a path inside a repository"):
        bring()
    assert not list(tmp_path.rglob("escape.txt"))


def test_command_line_end_to_end(hub, repo, tmp_path):
    done = kimi(hub, tmp_path, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / repo.commit
    assert str(folder) in done.stdout and f"pin this state with --revision {repo.commit}" in done.stdout
    assert contents(folder) == repo.files
    manifest = json.loads((folder.parents[1] / "kimi-manifests" / f"{repo.commit}.json").read_text())
    assert set(manifest["verified"]) == set(repo.files)


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


def test_one_bad_file_does_not_stop_the_others(hub, repo, bring, store):
    hub.faults[SHARDS[0]] = [Fault(damage=True, times=None)]
    with pytest.raises(KimiError, match="damaged twice"):
        bring(jobs=1)
    assert all(len(hub.gets(path)) == 1 for path in SHARDS[1:])
