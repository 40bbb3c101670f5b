"""Files on disk, listed without a network and compared with the Hub's digests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, kimi

from kimi_w4a8_eagle3.fetch.download import Repository

NOWHERE = "http://127.0.0.1:9"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def fetched(hub, tmp_path):
    """The repository's folder in a cache that has all of it."""
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    return tmp_path / "hub/models--org--model"


def test_it_is_looked_at_without_a_network_and_compared_with_one(hub, fetched, repo, tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert done.returncode == 0 and f"all {len(repo.files)} files are here" in done.stdout
    assert "never compared" not in done.stdout
    done = kimi(hub, tmp_path, "fetch", NAME, "--verify")
    assert done.returncode == 0, done.stderr
    assert f"{len(repo.files)} files, every digest is right" in done.stdout
    shutil.rmtree(fetched / "kimi-verified")
    assert "never compared" in kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").stdout
    assert kimi(hub, tmp_path, "fetch", NAME, "--verify").returncode == 0
    assert "never compared" not in kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").stdout


def test_the_digests_are_the_hubs_so_they_need_a_network(fetched, tmp_path):
    for options, environment in (["--offline"], {}), ([], {"HF_HUB_OFFLINE": "1"}):
        done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify", *options, **environment)
        assert done.returncode == 1 and "verify where the Hub can be reached" in done.stderr
    away = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify")
    assert away.returncode == 1 and "cannot reach the Hub" in away.stderr


def test_a_flipped_bit_is_found_deleted_and_repaired(hub, fetched, repo, tmp_path):
    blob = fetched / "blobs" / repo.digest(SHARDS[1])
    flip(blob)
    looked = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert looked.returncode == 0 and "never compared" in looked.stdout  # by size nothing is wrong, but it changed
    bad = kimi(hub, tmp_path, "fetch", NAME, "--verify")
    assert bad.returncode == 1
    assert f"damaged  {SHARDS[1]}" in bad.stdout and f"to do: kimi-w4a8 fetch {NAME} --revision" in bad.stdout
    assert not blob.exists() and not (fetched / "snapshots" / repo.commit / SHARDS[1]).is_symlink()

    repaired = kimi(hub, tmp_path, "fetch", NAME)
    assert repaired.returncode == 0, repaired.stderr
    assert blob.read_bytes() == repo.files[SHARDS[1]]
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 2, 1]


def test_damaged_content_of_two_paths(hub, repo, tmp_path):
    repo.files["copy.safetensors"] = repo.files[SHARDS[1]]
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    flip(tmp_path / "hub/models--org--model/blobs" / repo.digest(SHARDS[1]))
    bad = kimi(hub, tmp_path, "fetch", NAME, "--verify")
    assert bad.returncode == 1
    assert all(f"damaged  {path}:" in bad.stdout for path in (SHARDS[1], "copy.safetensors"))
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0


def test_a_wrong_file_is_deleted_in_the_cache_and_nowhere_else(hub, fetched, repo, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    link = fetched / "snapshots" / repo.commit / SHARDS[0]
    link.unlink()
    link.symlink_to(outside)
    assert kimi(hub, tmp_path, "fetch", NAME, "--verify").returncode == 1
    assert outside.read_bytes() == b"mine" and not link.is_symlink()


def test_content_that_huggingface_hub_shares_between_repositories_is_deleted_too(hub, fetched, repo, tmp_path):
    """The layout of its newer releases: a blob may be a link to blobs/ of the whole cache."""
    shared, blob = tmp_path / "hub/blobs/ab" / ("ab" + "0" * 62), fetched / "blobs" / repo.digest(SHARDS[0])
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(f"../../blobs/ab/{shared.name}")
    assert kimi(hub, tmp_path, "fetch", NAME, "--verify").returncode == 0
    flip(shared)
    assert kimi(hub, tmp_path, "fetch", NAME, "--verify").returncode == 1
    assert not shared.exists() and not blob.is_symlink()


def test_offline_names_missing_files_and_sizes(fetched, repo, tmp_path):
    (fetched / "blobs" / repo.digest(SHARDS[2])).unlink()
    (fetched / "blobs" / repo.digest("config.json")).write_bytes(b"{")
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert done.returncode == 1 and "2 files are missing or damaged" in done.stdout
    assert f"missing  {SHARDS[2]} (300.0 kB)" in done.stdout and "missing  config.json (24 bytes)" in done.stdout


def test_offline_tells_about_every_checkpoint_of_a_recipe(tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", "--recipe", "eagle3-opt", "--offline")
    assert done.returncode == 1
    assert "amd/Kimi-K2.5-W4A8 at main: its list of files is not in the cache" in done.stdout
    assert "to do, with network access: kimi-w4a8 fetch lightseekorg/kimi-k2.5-eagle3 --revision main" in done.stdout


def test_a_recipe_with_built_in_models_needs_nothing(tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", "--recipe", "tiny")
    assert done.returncode == 0 and "nothing to fetch" in done.stdout


def test_hf_hub_offline_means_offline(hub, tmp_path):
    done = kimi(hub, tmp_path, "fetch", NAME, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "not in the cache" in done.stdout
    assert not hub.log


def test_a_cache_without_a_list_of_the_files(hub, fetched, repo, tmp_path):
    """Older releases of huggingface_hub and of this package left such a cache."""
    from huggingface_hub import _tree_cache

    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    shutil.rmtree(fetched / "trees")
    offline = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert offline.returncode == 1 and "its list of files is not in the cache" in offline.stdout
    assert sum(Repository(NAME, "main", tmp_path / "hub").here().present.values()) == 900_171
    assert kimi(hub, tmp_path, "fetch", NAME, "--verify").returncode == 0
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    assert all(len(hub.gets(path)) == 1 for path in SHARDS)
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").returncode == 0


@pytest.mark.parametrize("noted", ["../../outside", "c" * 39, "\0"])
def test_a_note_of_a_branch_that_is_no_commit(noted, hub, tmp_path):
    path = tmp_path / "hub/models--org--model/refs/main"
    path.parent.mkdir(parents=True)
    path.write_text(noted, encoding="latin-1")
    done = kimi(hub, tmp_path, "fetch", NAME, "--offline")
    assert done.returncode == 1 and "not in the cache" in done.stdout
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
