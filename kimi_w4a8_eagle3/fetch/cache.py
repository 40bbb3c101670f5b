"""Repositories in the Hugging Face cache, where SGLang looks: what is here, and what was verified.

A manifest lies beside the files. It holds what the repository holds and which files were verified here, so a repository
can be checked without a network, and an interrupted fetch knows what it has.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from ..base.errors import KimiError
from .model import Listing, RemoteFile
from .names import Commit, Digest, RepoName, RepoPath, Revision
from .progress import ByteProgress
from .tree import Tree

FORMAT = 1
INDEX = "model.safetensors.index.json"
QUARANTINE = ".corrupt"
MAX_MANIFEST, MAX_INDEX = 32 << 20, 64 << 20
# What huggingface_hub leaves as a blob that it keeps once for all repositories of the cache.
_SHARED = re.compile(r"\.\./\.\./blobs/([0-9a-f]{2})/([0-9a-f]{64})")


@dataclass
class Manifest:
    """A listing, and the paths whose content was seen to match it."""

    listing: Listing
    verified: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """True if every file was verified."""
        return self.verified >= {file.path for file in self.listing.files}

    def as_json(self) -> str:
        head = {"format": FORMAT, **asdict(self.listing), "verified": sorted(self.verified)}
        return json.dumps(head, indent=1) + "\n"

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Manifest:
        """Parse a manifest; KimiError that names `path` when it is damaged."""
        try:
            data = json.loads(content)
            if (found := data["format"]) != FORMAT:
                raise ValueError(f"format {found}")
            files = [
                RemoteFile(RepoPath(f["path"]), f["size"], Digest(f["digest"]) if f["digest"] else None, bool(f["lfs"]))
                for f in data["files"]
            ]
            names = RepoName(data["repo"]), Revision(data["revision"]), Commit(data["commit"])
            return cls(Listing(*names, tuple(files)), {RepoPath(path) for path in data["verified"]})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise KimiError(
                f"damaged manifest: {type(error).__name__}: {error}",
                where=str(path),
                remedy="delete it; with network access `kimi-w4a8 fetch --verify` writes a new one",
            ) from None


@dataclass(frozen=True)
class Store:
    """One repository in the cache layout: `blobs/<digest>`, `snapshots/<commit>/<path>`, `refs/<revision>`.

    All reading and writing goes through `tree`. The paths are for it, and for messages.
    """

    cache: Path
    repo: str

    @property
    def tree(self) -> Tree:
        """The whole cache, so a repository's folder that is a link is not followed either."""
        return Tree(self.cache)

    @property
    def root(self) -> Path:
        return self.cache / ("models--" + self.repo.replace("/", "--"))

    def final(self, file: RemoteFile) -> Path:
        """Return the path of the blob, which is named by its digest."""
        return self.root / "blobs" / str(file.digest)

    def partial(self, file: RemoteFile) -> Path:
        """Return the path of the bytes that came so far, as huggingface_hub named it while it resumed downloads."""
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def content(self, file: RemoteFile) -> Path:
        """Return the path of the bytes: the blob, or the shared one to which huggingface_hub linked it."""
        shared = _SHARED.fullmatch(self.tree.readlink(self.final(file)) or "")
        return self.cache.joinpath("blobs", *shared.groups()) if shared else self.final(file)

    def snapshot(self, commit: Commit) -> Path:
        """Return the folder to serve from."""
        return self.root / "snapshots" / commit

    def arrived(self, file: RemoteFile) -> int:
        """Return the bytes of an incomplete file that an earlier attempt left."""
        return 0 if file.digest is None else min(self.tree.size(self.partial(file)) or 0, file.size)

    def here(self, file: RemoteFile) -> bool:
        """Return True if the content is here and has the right size."""
        return file.digest is not None and self.tree.size(self.content(file)) == file.size

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the repository's lock; KimiError when another fetch holds it."""
        busy = KimiError(
            "another `kimi-w4a8 fetch` works on this repository", where=str(self.root), remedy="wait for it to end"
        )
        return self.tree.lock(self.root / ".kimi-fetch.lock", busy)

    def save(self, manifest: Manifest) -> None:
        self.tree.write(self._manifest_path(manifest.listing.commit), manifest.as_json())

    def load(self, commit: Commit) -> Manifest | None:
        """Return the manifest of `commit`, or None; KimiError when it is damaged."""
        content = self.tree.read(self._manifest_path(commit), MAX_MANIFEST)
        return None if content is None else Manifest.parse(content, self._manifest_path(commit))

    def vouched(self, listing: Listing) -> set[str]:
        """Return the paths whose content was verified here before, for this commit or another one."""
        names = [name.removesuffix(".json") for name in self.tree.names(self.root / "kimi-manifests")]
        manifests = [self.load(Commit(name)) for name in names if Commit.accepts(name)]
        known = {f.digest for m in manifests if m for f in m.listing.files if f.path in m.verified}
        return {file.path for file in listing.files if file.digest in known}

    def known_commit(self, revision: str) -> Commit | None:
        """Return the commit that `revision` meant when it was last fetched; None if nothing of it is here."""
        with suppress(ValueError):  # not a revision, or no commit in the note
            if not Commit.accepts(revision):
                noted = self.tree.read(self.root / "refs" / Revision(revision), 41)
                return Commit(noted.decode().strip()) if noted else None
            commit = Commit(revision)
            if self.tree.size(self._manifest_path(commit)) or self.tree.names(self.snapshot(commit)):
                return commit
        return None

    def remember(self, listing: Listing) -> None:
        """Write `refs/<branch or tag>`, as the cache layout does. A commit needs no note."""
        if listing.revision != listing.commit:
            self.tree.write(self.root / "refs" / listing.revision, listing.commit)

    def finish(self, listing: Listing) -> Path:
        """Link every blob into the snapshot, and return the snapshot."""
        for file in listing.files:
            self.tree.link(self.final(file), self.snapshot(listing.commit) / file.path)
        return self.snapshot(listing.commit)

    def _manifest_path(self, commit: Commit) -> Path:
        return self.root / "kimi-manifests" / f"{commit}.json"


@dataclass
class Survey:
    """Files of one repository by their state on this machine. `unverified` ones have the right size."""

    manifest: Manifest
    missing: list[RemoteFile] = field(default_factory=list)
    corrupt: list[RemoteFile] = field(default_factory=list)
    unverified: list[RemoteFile] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.missing and not self.corrupt

    @property
    def missing_bytes(self) -> int:
        return sum(file.size for file in self.missing + self.corrupt)


def survey(store: Store, manifest: Manifest, served: bool = False) -> Survey:
    """Look for all files by size alone: instant, also for 534 GB.

    With `served`, a file that the snapshot does not lead to is missing, too.
    """
    found, folder = Survey(manifest), store.snapshot(manifest.listing.commit)
    for file in manifest.listing.files:
        linked = not served or store.tree.leads(folder / file.path, store.final(file))
        if not store.here(file) or not linked:
            found.missing.append(file)
        elif file.path not in manifest.verified:
            found.unverified.append(file)
    return found


def verify(store: Store, manifest: Manifest, progress: ByteProgress, jobs: int) -> Survey:
    """Hash every file, and update `manifest.verified`. A wrong file becomes `<name>.corrupt`, so nothing loads it."""
    found = survey(store, manifest, served=True)
    here = [file for file in manifest.listing.files if file not in found.missing]
    found.corrupt = wrong_ones(store, here, progress, jobs)
    for file in found.corrupt:
        # The bytes stay for a look, and go when the file has been fetched anew.
        path = store.final(file)
        if store.tree.size(store.content(file)) is not None:
            store.tree.replace(path, path.with_name(path.name + QUARANTINE))
    manifest.verified = {file.path for file in here if file not in found.corrupt}
    found.unverified.clear()
    return found


def wrong_ones(store: Store, files: list[RemoteFile], progress: ByteProgress, jobs: int) -> list[RemoteFile]:
    """Hash files that are here; return those with a wrong digest."""

    def is_wrong(file: RemoteFile) -> bool:
        with store.tree.open(store.content(file)) as stream:
            return file.hash_of(stream, progress.advance) != file.digest

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        wrong = list(pool.map(is_wrong, files))
    return [file for file, bad in zip(files, wrong, strict=True) if bad]


def recall(store: Store, revision: str) -> Manifest | None:
    """Return the manifest of an earlier fetch, or one made from a cache that another tool filled, or None."""
    commit = store.known_commit(revision)
    if commit is None:
        return None
    try:
        return store.load(commit) or _from_snapshot(store, revision, commit)
    except (ValueError, RecursionError) as error:
        raise KimiError(
            f"the cache holds what no repository can hold: {error}",
            where=str(store.snapshot(commit)),
            remedy="find out where it comes from and remove it",
        ) from None


def _from_snapshot(store: Store, revision: str, commit: Commit) -> Manifest | None:
    """Make a manifest from the snapshot's links: each names its blob, and with it the digest."""
    links = store.tree.links(store.snapshot(commit))
    if not links:
        return None
    files = []
    for path, target in links.items():
        name = PurePosixPath(target).name
        file = RemoteFile(RepoPath(path), 0, Digest(name) if Digest.accepts(name) else None, len(name) == 64)
        files.append(replace(file, size=store.tree.size(store.content(file)) or 0))
    # A weight shard that the index names and that was never fetched leaves no link. Its size is unknown.
    shards: set[str] = set()
    for index in (file for file in files if file.path == INDEX):
        with suppress(ValueError, KeyError, AttributeError, TypeError, RecursionError):
            shards = set(json.loads(store.tree.read(store.content(index), MAX_INDEX) or b"")["weight_map"].values())
    files += [RemoteFile(RepoPath(shard), 0, None, True) for shard in sorted(shards - links.keys())]
    return Manifest(Listing(RepoName(store.repo), Revision(revision), commit, tuple(files)))
