"""What this machine knows about a repository without asking anyone."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from ..base.errors import KimiError
from .manifest import Manifest
from .model import Listing, RemoteFile
from .names import Commit, Digest, RepoName, RepoPath, Revision
from .store import Store

INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20


def recall(store: Store, repo: str, revision: str) -> Manifest | None:
    """The manifest of an earlier fetch, or what a cache filled by other tools tells; None if nothing is here."""
    commit = store.known_commit(revision)
    if commit is None:
        return None
    manifest = Manifest.load(store.tree, store.manifest_path(commit))
    if manifest is None:
        try:
            manifest = _from_snapshot(store, revision, commit)
        except (ValueError, RecursionError) as error:
            raise KimiError(
                f"the cache holds what no repository can hold: {error}",
                where=str(store.snapshot(commit)),
                remedy="look who put it there and remove it",
            ) from None
    return manifest


def _from_snapshot(store: Store, revision: str, commit: Commit) -> Manifest | None:
    """A listing from the cache's links: each names its blob and with it the digest; sizes of lost blobs are unknown."""
    links = store.tree.links(store.snapshot(commit))
    files = [_linked(store, path, target) for path, target in links.items()]
    # A weight shard that the index names and that was never fetched leaves no link behind.
    absent = _shards(store, files) - links.keys()
    files += [RemoteFile(RepoPath(shard), 0, None, True) for shard in sorted(absent)]
    return Manifest(Listing(RepoName(store.repo), Revision(revision), commit, tuple(files))) if links else None


def _linked(store: Store, path: str, target: str) -> RemoteFile:
    """A file by its link; its digest is unknown when the link's last part is none."""
    name = PurePosixPath(target).name
    file = RemoteFile(RepoPath(path), 0, Digest(name) if Digest.accepts(name) else None, len(name) == 64)
    size = store.tree.size(store.content(file)) or 0
    return RemoteFile(file.path, size, file.digest, file.lfs)


def _shards(store: Store, files: list[RemoteFile]) -> set[str]:
    """The weight files that the checkpoint's index names."""
    index = next((file for file in files if file.path == INDEX), None)
    try:
        content = store.tree.read(store.content(index), MAX_INDEX) if index else None
        return set(json.loads(content)["weight_map"].values()) if content else set()
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return set()
