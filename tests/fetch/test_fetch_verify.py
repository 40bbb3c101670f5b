"""Checking what is on disk, with and without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.fetch_helpers import NAME, SHARDS, kimi

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fetch.cache import Manifest
from kimi_w4a8_eagle3.fetch.model import human

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


def test_it_is_verified_without_a_network(fetched, repo, tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify")
    assert done.returncode == 0, done.stderr
    assert f"{len(repo.files)} files, 900.2 kB, every digest is right" in done.stdout


def test_files_that_were_never_hashed_are_hashed(fetched, repo, tmp_path):
    path = fetched / f"kimi-manifests/{repo.commit}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verified": []}))
    assert "were never hashed" in kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").stdout
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify")
    assert done.returncode == 0 and "every digest is right" in done.stdout
    assert "were never hashed" not in kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").stdout


def test_a_flipped_bit_is_found_set_aside_and_repaired(hub, fetched, repo, tmp_path):
    blob = fetched / "blobs" / repo.digest(SHARDS[1])
    flip(blob)
    bad = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify", "--offline")
    assert bad.returncode == 1
    assert f"damaged  {SHARDS[1]}" in bad.stdout and f"to do: kimi-w4a8 fetch {NAME} --revision" in bad.stdout
    aside = blob.with_name(blob.name + ".corrupt")
    assert not blob.exists() and aside.exists()

    repaired = kimi(hub, tmp_path, "fetch", NAME)
    assert repaired.returncode == 0, repaired.stderr
    assert blob.read_bytes() == repo.files[SHARDS[1]] and not aside.exists()
    assert [len(hub.gets(path)) for path in SHARDS] == [1, 2, 1]


def test_damaged_content_of_two_paths_is_set_aside_once(hub, repo, tmp_path):
    repo.files["copy.safetensors"] = repo.files[SHARDS[1]]
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    blob = tmp_path / "hub/models--org--model/blobs" / repo.digest(SHARDS[1])
    flip(blob)
    bad = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify", "--offline")
    assert bad.returncode == 1
    assert all(f"damaged  {path}:" in bad.stdout for path in (SHARDS[1], "copy.safetensors"))
    assert not blob.exists() and blob.with_name(f"{blob.name}.corrupt").exists()


def test_a_damaged_blob_in_the_cache(hub, repo, tmp_path):
    kimi(hub, tmp_path, "fetch", NAME)
    link = tmp_path / "hub/models--org--model/snapshots" / repo.commit / SHARDS[0]
    flip(link.resolve())
    # By size alone nothing is wrong; hashing tells.
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").returncode == 0
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify").returncode == 1
    assert not link.exists()
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline").returncode == 1
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    assert link.read_bytes() == repo.files[SHARDS[0]]


def test_offline_names_missing_files_and_sizes(fetched, repo, tmp_path):
    (fetched / "blobs" / repo.digest(SHARDS[2])).unlink()
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert done.returncode == 1
    assert "1 of 7 files are missing or damaged (300.0 kB)" in done.stdout and f"missing  {SHARDS[2]}" in done.stdout


def test_offline_tells_about_every_checkpoint_of_a_recipe(tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", "--recipe", "eagle3-opt", "--offline")
    assert done.returncode == 1
    assert "amd/Kimi-K2.5-W4A8 at main: not in the cache" in done.stdout
    assert "to do, with network access: kimi-w4a8 fetch lightseekorg/kimi-k2.5-eagle3 --revision main" in done.stdout


def test_a_recipe_with_built_in_models_needs_nothing(tmp_path):
    done = kimi(NOWHERE, tmp_path, "fetch", "--recipe", "tiny")
    assert done.returncode == 0 and "nothing to fetch" in done.stdout


def test_hf_hub_offline_means_offline(hub, tmp_path):
    done = kimi(hub, tmp_path, "fetch", NAME, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "not in the cache" in done.stdout
    assert not hub.log


def test_a_cache_that_another_tool_filled(hub, repo, tmp_path):
    """No manifest of ours: digests come from the blobs' names, shards from the index."""
    from huggingface_hub import snapshot_download

    snapshot_download(NAME, cache_dir=tmp_path / "hub", endpoint=hub.endpoint, ignore_patterns=[SHARDS[2]])
    offline = kimi(NOWHERE, tmp_path, "fetch", NAME, "--offline")
    assert offline.returncode == 1 and f"missing  {SHARDS[2]} (size unknown)" in offline.stdout
    flip(tmp_path / "hub/models--org--model/blobs" / repo.digest(SHARDS[0]))
    verified = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify", "--offline")
    assert verified.returncode == 1 and f"damaged  {SHARDS[0]}" in verified.stdout
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify").returncode == 0


def test_without_a_manifest_it_is_verified_against_the_hub_once(hub, fetched, repo, tmp_path):
    shutil.rmtree(fetched / "kimi-manifests")
    shutil.rmtree(fetched / "snapshots")
    unknown = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify", "--offline")
    assert unknown.returncode == 1 and "not in the cache" in unknown.stdout
    hub.log.clear()
    kimi(hub, tmp_path, "fetch", NAME, "--verify")  # no snapshot: not whole
    assert hub.log and not any(hub.gets(path) for path in repo.files)
    assert kimi(hub, tmp_path, "fetch", NAME).returncode == 0
    assert not any(hub.gets(path) for path in repo.files)
    assert kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify").returncode == 0


def test_a_damaged_manifest_is_said_plainly(fetched, repo, tmp_path):
    (fetched / f"kimi-manifests/{repo.commit}.json").write_text('{"format": 1')
    done = kimi(NOWHERE, tmp_path, "fetch", NAME, "--verify")
    assert done.returncode == 1 and "damaged manifest" in done.stderr and "Traceback" not in done.stderr


def test_a_manifest_of_another_format_is_refused(fetched, repo):
    path = fetched / f"kimi-manifests/{repo.commit}.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(KimiError, match="format 99"):
        Manifest.parse(path.read_bytes(), path)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (497e9, "497.0 GB"), (1.5e12, "1.5 TB")])
def test_sizes_are_written_as_people_read_them(size, text):
    assert human(size) == text
