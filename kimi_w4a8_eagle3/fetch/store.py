"""Where files lie: in the Hugging Face cache, which SGLang looks into."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import KimiError
from .manifest import Manifest
from .model import Listing, RemoteFile
from .names import Commit, Revision
from .tree import Tree

# What huggingface_hub 1.x leaves as a blob that it keeps once for all repositories of the cache.
_SHARED = re.compile(r"\.\./\.\./blobs/([0-9a-f]{2})/([0-9a-f]{64})")


@dataclass(frozen=True)
class Store:
    """One repository in the documented cache layout: `blobs/<digest>`, `snapshots/<commit>/<path>`, `refs/<revision>`.

    All reading and writing goes through `tree`; the paths are for it, and for messages.
    """

    cache: Path
    repo: str

    @property
    def tree(self) -> Tree:
        """The whole cache: a repository's folder that is a link to elsewhere is not followed either."""
        return Tree(self.cache)

    @property
    def root(self) -> Path:
        """The repository's folder in the cache."""
        return self.cache / ("models--" + self.repo.replace("/", "--"))

    def final(self, file: RemoteFile) -> Path:
        """Where the complete file lies: the blob, named by its digest."""
        return self.root / "blobs" / str(file.digest)

    def content(self, file: RemoteFile) -> Path:
        """Where its bytes lie: the blob, or the one that all repositories share, if huggingface_hub linked it here."""
        shared = _SHARED.fullmatch(self.tree.readlink(self.final(file)) or "")
        return self.cache.joinpath("blobs", *shared.groups()) if shared else self.final(file)

    def served(self, commit: Commit, file: RemoteFile) -> bool:
        """Whether who opens the file in the snapshot gets the blob."""
        return self.tree.leads(self.snapshot(commit) / file.path, self.final(file))

    def partial(self, file: RemoteFile) -> Path:
        """Where the bytes lie that came so far.

        The name that huggingface_hub used while it still resumed downloads: its leftovers are continued.
        """
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def manifest_path(self, commit: Commit) -> Path:
        """One manifest a commit."""
        return self.root / "kimi-manifests" / f"{commit}.json"

    def manifests(self) -> list[Manifest]:
        """Every commit's."""
        folder = self.root / "kimi-manifests"
        loaded = [Manifest.load(self.tree, folder / name) for name in self.tree.names(folder) if name.endswith(".json")]
        return [manifest for manifest in loaded if manifest]

    def known_commit(self, revision: str) -> Commit | None:
        """The commit that `revision` meant when it was last fetched, without asking the Hub.

        A commit stands for itself if it is here; a branch or tag is looked up in `refs/`.
        """
        try:
            if Commit.accepts(revision):
                commit = Commit(revision)
                here = self.tree.size(self.manifest_path(commit)) or self.tree.names(self.snapshot(commit))
                return commit if here else None
            noted = self.tree.read(self.root / "refs" / Revision(revision), 1000)
            return Commit(noted.decode().strip()) if noted else None
        except ValueError:  # no revision, or no commit in the note: nothing is known
            return None

    def remember(self, listing: Listing) -> None:
        """Write `refs/<branch or tag>`, as the cache layout does; a commit needs no note."""
        if listing.revision != listing.commit:
            self.tree.write(self.root / "refs" / listing.revision, listing.commit)

    def finish(self, listing: Listing) -> Path:
        """Link every blob into the snapshot; returns that, the directory to serve from."""
        folder = self.snapshot(listing.commit)
        for file in listing.files:
            self.tree.link(self.final(file), folder / file.path)
        return folder

    def snapshot(self, commit: Commit) -> Path:
        """The snapshot folder."""
        return self.root / "snapshots" / commit


def arrived(store: Store, file: RemoteFile) -> int:
    """Bytes of an incomplete file that an earlier attempt left."""
    return 0 if file.digest is None else min(store.tree.size(store.partial(file)) or 0, file.size)


def exclusive(store: Store) -> AbstractContextManager[None]:
    """Hold the repository's lock; KimiError when another fetch holds it. The lock dies with its process."""
    busy = KimiError(
        "another `kimi-w4a8 fetch` works on this repository", where=str(store.root), remedy="wait for it to end"
    )
    return store.tree.lock(store.root / ".kimi-fetch.lock", busy)
