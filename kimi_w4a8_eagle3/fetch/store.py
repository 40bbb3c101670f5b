"""Where files lie: the Hugging Face cache (default, what SGLang looks into) or a plain directory (`--dir`)."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import KimiError
from .manifest import Manifest
from .model import Listing, RemoteFile


class Store(Protocol):
    """The places of one repository's files on this machine."""

    @property
    def root(self) -> Path:
        """The folder that holds everything (for the free-space check and the lock)."""

    def final(self, file: RemoteFile) -> Path:
        """Where the complete file lies."""

    def partial(self, file: RemoteFile) -> Path:
        """Where the bytes lie that came so far."""

    def trusts(self, file: RemoteFile, manifest: Manifest) -> bool:
        """Whether a file of the right size at `final` is known to have the right content."""

    def manifest_path(self, commit: str) -> Path:
        """Where the manifest for a commit lies."""

    def known_commit(self, revision: str) -> str | None:
        """The commit that `revision` meant when it was last fetched, without asking the Hub."""

    def remember(self, listing: Listing) -> None:
        """Note which commit the listing's revision means, for `known_commit`."""

    def finish(self, listing: Listing) -> Path:
        """Make the complete repository visible and return the directory to serve from."""

    def snapshot(self, commit: str) -> Path:
        """The directory to serve from."""


@dataclass(frozen=True)
class DirectoryStore:
    """Files under their repository paths in one directory; our own records under `.kimi/`."""

    directory: Path

    @property
    def root(self) -> Path:
        """The directory itself."""
        return self.directory

    def final(self, file: RemoteFile) -> Path:
        """`DIR/<path in the repository>`."""
        return inside(self.directory, file)

    def partial(self, file: RemoteFile) -> Path:
        """Named by path and digest: a new revision never continues an old one's bytes."""
        name = hashlib.sha256(f"{file.path}\0{file.digest}".encode()).hexdigest()[:32]
        return self.directory / ".kimi" / "partial" / f"{name}.incomplete"

    def trusts(self, file: RemoteFile, manifest: Manifest) -> bool:
        """Only what the manifest lists as verified: shards of two revisions often have equal sizes."""
        return file.path in manifest.verified

    def manifest_path(self, commit: str) -> Path:
        """One manifest per directory, whatever the commit."""
        return self.directory / ".kimi" / "manifest.json"

    def known_commit(self, revision: str) -> str | None:
        """The manifest's commit, if it was fetched under this name."""
        manifest = Manifest.load(self.manifest_path(""))
        if manifest is None or revision not in (manifest.listing.revision, manifest.listing.commit):
            return None
        return manifest.listing.commit

    def remember(self, listing: Listing) -> None:
        """The manifest says it."""

    def finish(self, listing: Listing) -> Path:
        """Nothing is left to do."""
        return self.directory

    def snapshot(self, commit: str) -> Path:
        """The directory."""
        return self.directory


@dataclass(frozen=True)
class CacheStore:
    """The documented cache layout: `blobs/<digest>`, `snapshots/<commit>/<path>` links, `refs/<revision>`."""

    cache: Path
    repo: str

    @property
    def root(self) -> Path:
        """The repository's folder in the cache."""
        return self.cache / ("models--" + self.repo.replace("/", "--"))

    def final(self, file: RemoteFile) -> Path:
        """The blob, named by its digest."""
        return self.root / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        """The name that huggingface_hub used while it still resumed downloads: its leftovers are continued."""
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def trusts(self, file: RemoteFile, manifest: Manifest) -> bool:
        """A blob's name is its digest, and it gets that name only after the check."""
        return True

    def manifest_path(self, commit: str) -> Path:
        """One manifest a commit."""
        return self.root / "kimi-manifests" / f"{commit}.json"

    def known_commit(self, revision: str) -> str | None:
        """A commit stands for itself; a branch or tag is looked up in `refs/`."""
        if self.manifest_path(revision).exists() or (self.root / "snapshots" / revision).is_dir():
            return revision
        reference = self.root / "refs" / revision
        return reference.read_text().strip() if reference.is_file() else None

    def remember(self, listing: Listing) -> None:
        """Write `refs/<branch or tag>`, as the cache layout does; a commit needs no note."""
        if listing.revision != listing.commit:
            reference = self.root / "refs" / listing.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(listing.commit)

    def finish(self, listing: Listing) -> Path:
        """Link every blob into the snapshot."""
        folder = self.snapshot(listing.commit)
        for file in listing.files:
            _link(self.final(file), inside(folder, file))
        return folder

    def snapshot(self, commit: str) -> Path:
        """The snapshot folder."""
        return self.root / "snapshots" / commit


def inside(folder: Path, file: RemoteFile) -> Path:
    """The file's place under `folder`; KimiError for a repository path that leads out of it."""
    if ".." in Path(file.path).parts or Path(file.path).is_absolute():
        raise KimiError(f"the repository names a file outside itself: {file.path}", remedy="do not use it")
    return folder / file.path


def _link(blob: Path, link: Path) -> None:
    """A relative link, so that the cache can be moved; a hard link where the file system has no symbolic ones."""
    target = os.path.relpath(blob, link.parent)
    if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 - compared as written
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(target)
    except OSError:
        link.hardlink_to(blob)


@contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Hold the repository's lock; KimiError when another fetch holds it. The lock dies with its process."""
    path = store.root / ".kimi-fetch.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KimiError(
                "another `kimi fetch` works on this repository", where=str(store.root), remedy="wait for it to end"
            ) from None
        yield
