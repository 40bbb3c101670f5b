"""What this machine has of a repository, without asking anyone: is every file there, is its content its digest's?"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ..base.errors import KimiError
from .manifest import Manifest
from .model import Listing, RemoteFile
from .names import Commit, Digest, RepoName, RepoPath, Revision
from .store import Store

INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20
QUARANTINE = ".corrupt"


@dataclass
class Report:
    """The files of one repository by their state on this machine."""

    manifest: Manifest
    missing: list[RemoteFile] = field(default_factory=list)
    corrupt: list[RemoteFile] = field(default_factory=list)
    unverified: list[RemoteFile] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Everything is there; `unverified` files have the right size and were not hashed."""
        return not self.missing and not self.corrupt

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files that are missing or corrupt."""
        return sum(file.size for file in self.missing + self.corrupt)


def survey(store: Store, manifest: Manifest, served: bool = False) -> Report:
    """What is there and what is missing, by size alone: instant, also for 534 GB.

    `served`: a file that cannot be had from the directory to serve from is missing, too.
    """
    report, commit = Report(manifest), manifest.listing.commit
    for file in manifest.listing.files:
        here = file.digest is not None and store.tree.size(store.content(file)) == file.size
        if not here or (served and not store.served(commit, file)):
            report.missing.append(file)
        elif file.path not in manifest.verified:
            report.unverified.append(file)
    return report


def verify(store: Store, manifest: Manifest, advance: Callable[[int], None], jobs: int) -> Report:
    """Hash every file; a wrong one is set aside as `<name>.corrupt`, so that nothing loads or trusts it.

    Updates `manifest.verified`; the caller saves it.
    """
    report = survey(store, manifest, served=True)
    there = [file for file in manifest.listing.files if file not in report.missing]
    right, report.corrupt = hashed(store, there, advance, jobs)
    for file in report.corrupt:
        # The bytes stay for a look and go when the file has been fetched anew.
        path = store.final(file)
        if store.tree.size(store.content(file)) is not None:
            store.tree.replace(path, path.with_name(path.name + QUARANTINE))
    manifest.verified = {file.path for file in right}
    report.unverified.clear()
    return report


def hashed(
    store: Store, files: list[RemoteFile], advance: Callable[[int], None], jobs: int
) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Read files that are here and divide them by their digests: the right ones, the wrong ones."""

    def is_right(file: RemoteFile) -> bool:
        with store.tree.reading(store.content(file)) as stream:
            return file.hash_of(stream, advance) == file.digest

    right: list[RemoteFile] = []
    wrong: list[RemoteFile] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for file, good in zip(files, pool.map(is_right, files), strict=True):
            (right if good else wrong).append(file)
    return right, wrong


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
