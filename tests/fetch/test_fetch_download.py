"""A whole repository arrives, with every digest compared and nothing asked for twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, TOKEN, at_endpoint, kimi
from support.hub_server import Repo, serve

from kimi_w4a8_eagle3.base import files
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.fetch.download import Repository


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_snapshot_is_whole_and_without_a_network_huggingface_hub_finds_it(hub, repo, bring, wanted):
    from huggingface_hub import snapshot_download

    folder = bring().folder
    assert contents(folder) == repo.files and folder.name == repo.commit
    assert Path(snapshot_download(NAME, cache_dir=wanted.cache, local_files_only=True)) == folder


def test_a_second_fetch_asks_for_no_file_and_hashes_none(hub, bring, said):
    bring()
    assert said == ["hashing 900.2 kB of org/model"]
    bring()
    assert {path: len(hub.gets(path)) for path in SHARDS} == dict.fromkeys(SHARDS, 1) and len(said) == 1


def test_a_file_that_changed_since_then_is_hashed_again_and_replaced(hub, repo, bring):
    shard = bring().folder / SHARDS[1]
    shard.write_bytes(b"cut")  # a link: the blob gets this content
    assert bring().verified
    assert shard.read_bytes() == repo.files[SHARDS[1]]
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 2, 1]


def test_a_new_revision_fetches_only_what_changed_and_the_old_one_stays(hub, repo, bring, wanted):
    first = bring()
    old, repo.files[SHARDS[2]] = repo.files[SHARDS[2]], repo.files[SHARDS[2]][::-1]
    repo.commit, repo.branches = "d" * 40, ("main", first.folder.name)
    second = bring()
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 1, 2]
    assert (second.folder.name, (second.folder / SHARDS[2]).read_bytes()) == ("d" * 40, old[::-1])
    pinned = replace(wanted, revision=first.folder.name).here()
    assert pinned == first and (first.folder / SHARDS[2]).read_bytes() == old


def test_a_pinned_commit_and_a_listing_of_several_pages(repo, hub, tmp_path, monkeypatch):
    with serve({NAME: repo}, page=2) as paged:
        at_endpoint(monkeypatch, paged.endpoint)
        snapshot = Repository(NAME, repo.commit, tmp_path / "other").fetch(print)
    assert contents(snapshot.folder) == repo.files


def test_the_token_goes_to_the_hub_and_never_to_the_storage(hub, repo, bring, monkeypatch):
    repo.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    bring()
    assert all(request.authorized for request in hub.log if request.origin == "hub")
    storage = [request.authorized for request in hub.log if request.origin == "storage"]
    assert len(storage) >= len(SHARDS) and not any(storage)


def test_not_enough_space_is_said_before_any_file_is_asked_for(hub, bring, monkeypatch):
    monkeypatch.setattr(files, "RESERVE", 1 << 60)
    with pytest.raises(KimiError, match=r"not enough disk space: 0\.0 GB needed") as error:
        bring()
    assert "HF_HOME" in error.value.remedy and not any(hub.gets(path) for path in SHARDS)


def test_several_repositories_by_the_command_line(repo, hub, tmp_path):
    draft = Repo({"draft.bin": bytes(2000)}, commit="a" * 40)
    hub.repos["org/draft"] = draft
    done = kimi(hub, tmp_path, "fetch", NAME, "org/draft")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / repo.commit
    assert str(folder) in done.stdout and f"{NAME} at {repo.commit}: complete, every digest compared" in done.stdout
    assert contents(folder) == repo.files
    assert (tmp_path / "hub/models--org--draft/snapshots" / draft.commit / "draft.bin").is_file()


@pytest.mark.parametrize(
    "arguments", [[], [NAME, "--recipe", "tiny"], ["tiny"], ["--recipe", "tiny", "--revision", "v1"]]
)
def test_a_command_that_names_nothing_or_too_much(arguments, tmp_path):
    done = kimi("http://127.0.0.1:9", tmp_path, "fetch", *arguments)
    assert done.returncode == 2 and "--re" in done.stderr


@pytest.mark.parametrize(
    ("repo", "revision"),
    [*[(name, "main") for name in ("../..", "a/b/c", "a--b", "")], (NAME, "../x"), (NAME, "a\0"), (NAME, "-x")],
)
def test_an_invalid_repository_or_revision_is_refused(repo, revision, tmp_path):
    with pytest.raises(UsageError):
        Repository.named(repo, revision, tmp_path)
    assert Repository.named("a.b/c-d_e", "refs/pr/1", tmp_path)
