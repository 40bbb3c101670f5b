"""What this machine knows about a repository without asking anyone."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .manifest import Manifest
from .model import Listing, RemoteFile
from .store import CacheStore, Store

INDEX = "model.safetensors.index.json"


def recall(store: Store, repo: str, revision: str) -> Manifest | None:
    """The manifest of an earlier fetch, or what a cache filled by other tools tells; None if nothing is here."""
    commit = store.known_commit(revision)
    if commit is None:
        return None
    manifest = Manifest.load(store.manifest_path(commit))
    if manifest is None and isinstance(store, CacheStore):
        manifest = _from_snapshot(store, revision, commit)
    return manifest


def _from_snapshot(store: CacheStore, revision: str, commit: str) -> Manifest | None:
    """A listing from the cache's links: each names its blob and with it the digest; sizes of lost blobs are unknown."""
    folder = store.snapshot(commit)
    links = [path for path in sorted(folder.rglob("*")) if path.is_symlink()] if folder.is_dir() else []
    files = [_linked(folder, link) for link in links]
    names = {file.path for file in files}
    # A weight shard that the index names and that was never fetched leaves no link behind.
    files += [RemoteFile(shard, 0, "", True) for shard in sorted(_shards(folder) - names)]
    return Manifest(Listing(store.repo, revision, commit, tuple(files))) if links else None


def _linked(folder: Path, link: Path) -> RemoteFile:
    digest = link.readlink().name
    size = link.stat().st_size if link.exists() else 0
    return RemoteFile(link.relative_to(folder).as_posix(), size, digest, bool(re.fullmatch(r"[0-9a-f]{64}", digest)))


def _shards(folder: Path) -> set[str]:
    """The weight files that the checkpoint's index names."""
    try:
        return set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return set()
