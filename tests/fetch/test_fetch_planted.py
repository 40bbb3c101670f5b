"""What already lies in a cache or folder: links and files of another user, or of an attack before this."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, client, kimi, quiet
from support.hub_server import Repo

from kimi_w4a8_eagle3.fetch.download import fetch
from kimi_w4a8_eagle3.fetch.progress import ByteProgress

SHARD = SHARDS[0]


def planted_in_the_cache(root: Path, repo: Repo, outside: Path) -> dict[str, Callable[[], None]]:
    shard, blobs = repo.digest(SHARD), root / "blobs"

    def link(path: Path, target: Path) -> Callable[[], None]:
        def plant() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)

        return plant

    def hard(path: Path) -> Callable[[], None]:
        def plant() -> None:
            path.parent.mkdir(parents=True)
            os.link(outside / "bashrc", path)

        return plant

    def pipe(path: Path) -> Callable[[], None]:
        def plant() -> None:
            path.parent.mkdir(parents=True)
            os.mkfifo(path)

        return plant

    return {
        "root": link(root, outside),
        "blobs": link(blobs, outside),
        "blob": link(blobs / shard, outside / "shard"),
        "blob, hard link": hard(blobs / shard),
        "incoming": link(root / ".kimi-incoming", outside),
        "incoming file": link(root / ".kimi-incoming" / shard, outside / "bashrc"),
        "incoming file, hard link": hard(root / ".kimi-incoming" / shard),
        "incoming file, named pipe": pipe(root / ".kimi-incoming" / shard),
        "snapshots": link(root / "snapshots", outside),
        "snapshot": link(root / "snapshots" / repo.commit, outside),
        "folder of a snapshot": link(root / "snapshots" / repo.commit / "tokenizer", outside),
        "file of a snapshot": link(root / "snapshots" / repo.commit / SHARD, outside / "shard"),
        "refs": link(root / "refs", outside),
        "ref, named pipe": pipe(root / "refs/main"),
        "ref": link(root / "refs/main", outside / "bashrc"),
        "lock": link(root / ".kimi-fetch.lock", outside / "bashrc"),
        "manifests": link(root / "kimi-manifests", outside),
        "manifest": link(root / "kimi-manifests" / f"{repo.commit}.json", outside / "bashrc"),
    }


REFUSED = {"root", "blobs", "incoming", "snapshots", "snapshot", "folder of a snapshot", "refs", "lock", "manifests"}
PLACES = sorted(planted_in_the_cache(Path("x"), Repo({SHARD: b""}), Path("y")))


@pytest.mark.parametrize("place", PLACES)
def test_what_was_planted_in_the_cache_leads_nowhere(place, hub, repo, tmp_path, outside):
    root = tmp_path / "hub/models--org--model"
    root.parent.mkdir()
    planted_in_the_cache(root, repo, outside)[place]()
    for offline in (["--offline"], ["--verify", "--offline"]):
        assert kimi(hub, tmp_path, "fetch", NAME, *offline).returncode == 1
    done = kimi(hub, tmp_path, "fetch", NAME)
    if place in REFUSED:
        assert done.returncode == 1 and "is a symbolic link" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr
        folder = root / "snapshots" / repo.commit
        assert all((folder / path).read_bytes() == data for path, data in repo.files.items())
        assert all((folder / path).resolve().is_relative_to(root.resolve()) for path in repo.files)
        assert all((root / "blobs" / repo.digest(path)).stat().st_nlink == 1 for path in repo.files)


def test_a_link_of_the_snapshot_that_leads_elsewhere_is_found_and_mended(hub, repo, tmp_path, outside):
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    link = tmp_path / "hub/models--org--model/snapshots" / repo.commit / SHARD
    link.unlink()
    link.symlink_to(outside / "shard")
    for how in ("--verify", "--offline"):
        done = kimi(hub, tmp_path, "fetch", NAME, how)
        assert done.returncode == 1 and f"missing  {SHARD}" in done.stdout
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    assert link.read_bytes() == repo.files[SHARD] and len(hub.gets(SHARD)) == 1


@pytest.mark.parametrize("noted", ["../../outside", "c" * 39, "", "\0", "\xff", "x" * 2000])
def test_a_note_of_a_branch_that_is_no_commit(noted, hub, tmp_path, outside):
    path = tmp_path / "hub/models--org--model/refs/main"
    path.parent.mkdir(parents=True)
    path.write_text(noted, encoding="latin-1")
    done = kimi(hub, tmp_path, "fetch", NAME, "--offline")
    assert done.returncode == 1 and "not in the cache" in done.stdout
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0


def test_a_blob_that_another_tool_left_is_hashed_before_it_is_called_right(hub, repo, bring, store):
    blob = store.root / "blobs" / repo.digest(SHARD)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(len(repo.files[SHARD])))
    bring()
    assert blob.read_bytes() == repo.files[SHARD] and len(hub.gets(SHARD)) == 1


@pytest.mark.parametrize("planted", [False, True])
def test_the_blobs_that_huggingface_hub_shares_are_used_unless_they_lie_elsewhere(
    planted, hub, repo, bring, store, tmp_path
):
    """Its layout since 1.x: a link to blobs/ of the whole cache, which must be a folder there."""
    shared, blob = store.cache / "blobs", store.root / "blobs" / repo.digest(SHARD)
    place = tmp_path / "elsewhere" if planted else shared
    for folder in (place / "ab", blob.parent):
        folder.mkdir(parents=True)
    if planted:
        shared.symlink_to(place)
    name = "ab" + "0" * 62
    (place / "ab" / name).write_bytes(repo.files[SHARD])
    blob.symlink_to(f"../../blobs/ab/{name}")
    assert (bring().folder / SHARD).read_bytes() == repo.files[SHARD]
    assert (len(hub.gets(SHARD)), blob.is_symlink()) == ((1, False) if planted else (0, True))


def test_a_new_commit_does_not_hash_again_what_an_earlier_one_verified(hub, repo, bring, store, monkeypatch):
    bring()
    repo.files["README.md"], repo.commit = b"new", "d" * 40
    labels: list[str] = []

    def show(label: str, total: int) -> ByteProgress:
        labels.append(label)
        return quiet(label, total)

    fetch(client(hub), store, NAME, "main", show)
    assert labels == [f"{NAME} (1 files)"]


@pytest.mark.parametrize("path", ["a\\b", "x\x1b[2J", "/".join(["d"] * 40) + "/x", "/".join(["d"] * 1500) + "/x"])
def test_a_snapshot_that_no_repository_can_have(path, hub, repo, tmp_path, monkeypatch):
    folder = tmp_path / "hub/models--org--model/snapshots" / repo.commit
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    *above, name = path.split("/")
    for part in above:  # step by step: such a path is too long for one call
        Path(part).mkdir()
        os.chdir(part)
    Path(name).symlink_to("../../blobs/" + "a" * 40)
    os.chdir(tmp_path)
    try:
        done = kimi(hub, tmp_path, "fetch", NAME, "--revision", repo.commit, "--offline")
        assert done.returncode == 1 and "the cache has names that no repository can have" in done.stderr
        assert "\x1b" not in done.stderr
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # shutil's own recursion does not reach that deep
