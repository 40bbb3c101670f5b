"""Repositories in the Hugging Face cache, where SGLang looks: files that are here, and those that were verified.

A manifest lies beside the files. It has the repository's listing and the files that were verified here. With it a
repository is checked without a network, and an interrupted fetch continues.

No link below the cache folder is followed, so one that an earlier attack left leads no read, write or removal out of
it. The folder itself is what the user named, and may be reached by links.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from ..base.errors import KimiError
from ..base.files import write_atomic
from .model import Listing, RemoteFile
from .names import MAX_PARTS, Commit, Digest, RepoName, RepoPath, Revision
from .progress import ByteProgress

FORMAT = 1
INDEX = "model.safetensors.index.json"
QUARANTINE = ".corrupt"
MAX_MANIFEST, MAX_INDEX = 32 << 20, 64 << 20
# Link that huggingface_hub leaves as a blob if it keeps the bytes once for all repositories of the cache.
_SHARED = re.compile(r"\.\./\.\./blobs/([0-9a-f]{2})/([0-9a-f]{64})")


class NotPlain(KimiError):
    """A symbolic link lies where a folder of ours or the lock is expected."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path.name} is a symbolic link",
            where=str(path),
            expected="plain files and folders: no link is followed below the cache folder",
            remedy="find out where it comes from and remove it; to keep files elsewhere, name that place with HF_HOME",
        )


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
    """One repository in the cache layout: `blobs/<digest>`, `snapshots/<commit>/<path>`, `refs/<revision>`."""

    cache: Path
    repo: str
    kind: str = "model"

    @property
    def root(self) -> Path:
        return self.cache / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def incoming(self) -> Path:
        """Folder of files that are not yet verified. A fetch that was killed leaves it to the next one."""
        return self.root / ".kimi-incoming"

    def final(self, file: RemoteFile) -> Path:
        """Return the path of the blob, which is named by its digest."""
        return self.root / "blobs" / str(file.digest)

    def content(self, file: RemoteFile) -> Path:
        """Return the path of the bytes: the blob, or the shared one to which huggingface_hub linked it."""
        if shared := _SHARED.fullmatch(_target(self.final(file))):
            place = Path("blobs", *shared.groups())
            if (self.cache / place).resolve() == self.cache.resolve() / place:
                return self.cache / place
        return self.final(file)

    def snapshot(self, commit: Commit) -> Path:
        """Return the folder to serve from."""
        return self.root / "snapshots" / commit

    def here(self, file: RemoteFile) -> bool:
        """Return True if the content is here and has the right size."""
        return file.digest is not None and size(self.content(file)) == file.size

    def served(self, commit: Commit, file: RemoteFile) -> bool:
        """Return True if the snapshot leads to the file's blob."""
        path = self.snapshot(commit) / file.path
        return _target(path) == os.path.relpath(self.final(file), path.parent)

    def links(self) -> dict[str, str]:
        """Return the targets of all links by their paths below `root`; raise NotPlain if a folder is a link."""
        if self.root.is_symlink():
            raise NotPlain(self.root)
        found: dict[str, str] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            # By descriptors, because paths in a hostile cache may be too long for one call.
            for folder, folders, files, descriptor in os.fwalk(self.root, follow_symlinks=False):
                if folder.count("/") > str(self.root).count("/") + MAX_PARTS + 2:  # snapshots/<commit>
                    raise impossible("folders nested too deep", self.root)
                for name in folders + files:
                    with suppress(OSError):  # not a link
                        target = os.readlink(name, dir_fd=descriptor)
                        if name in folders:
                            raise NotPlain(Path(folder, name))
                        found[os.path.relpath(f"{folder}/{name}", self.root)] = target
        return dict(sorted(found.items()))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the repository's lock; KimiError when another fetch holds it. The lock dies with its process."""
        self.links()
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / ".kimi-fetch.lock"
        if path.is_symlink():
            raise NotPlain(path)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what, remedy = "another `kimi-w4a8 fetch` works on this repository", "wait for it to end"
                raise KimiError(what, where=str(self.root), remedy=remedy) from None
            shutil.rmtree(self.incoming, ignore_errors=True)
            self.incoming.mkdir()
            try:
                yield
            finally:
                shutil.rmtree(self.incoming, ignore_errors=True)

    def save(self, manifest: Manifest) -> None:
        write(self._manifest_path(manifest.listing.commit), manifest.as_json())

    def load(self, commit: Commit) -> Manifest | None:
        """Return the manifest of `commit`, or None; KimiError when it is damaged."""
        content = read(self._manifest_path(commit), MAX_MANIFEST)
        return None if content is None else Manifest.parse(content, self._manifest_path(commit))

    def vouched(self, listing: Listing) -> set[str]:
        """Return the paths whose content was verified here before, for this commit or another one."""
        names = [path.stem for path in self.root.glob("kimi-manifests/*.json")]
        manifests = [self.load(Commit(name)) for name in names if Commit.accepts(name)]
        known = {f.digest for m in manifests if m for f in m.listing.files if f.path in m.verified}
        return {file.path for file in listing.files if file.digest in known}

    def known_commit(self, revision: str) -> Commit | None:
        """Return the commit that `revision` meant when it was last fetched; None if nothing of it is here."""
        self.links()
        with suppress(ValueError):  # not a revision, or no commit in the note
            if not Commit.accepts(revision):
                noted = read(self.root / "refs" / Revision(revision), 41)
                return Commit(noted.decode().strip()) if noted else None
            commit = Commit(revision)
            if size(self._manifest_path(commit)) or self.snapshot(commit).is_dir():
                return commit
        return None

    def remember(self, listing: Listing) -> None:
        """Write `refs/<branch or tag>`, as the cache layout does. A commit needs no note."""
        if listing.revision != listing.commit:
            write(self.root / "refs" / listing.revision, listing.commit)

    def place(self, arrived: Path, file: RemoteFile) -> None:
        """Give a verified file its name in the cache. A link with this name is replaced, not what it leads to."""
        self.final(file).parent.mkdir(exist_ok=True)
        arrived.replace(self.final(file))

    def finish(self, listing: Listing) -> Path:
        """Link every blob into the snapshot, relatively so that the cache can be moved, and return the snapshot."""
        for file in listing.files:
            path = self.snapshot(listing.commit) / file.path
            if not self.served(listing.commit, file):
                path.unlink(missing_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(os.path.relpath(self.final(file), path.parent))
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
    found = Survey(manifest)
    for file in manifest.listing.files:
        if not store.here(file) or (served and not store.served(manifest.listing.commit, file)):
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
        with suppress(FileNotFoundError):  # two paths with the same content
            store.final(file).replace(quarantined(store, file))
    manifest.verified = {file.path for file in here if file not in found.corrupt}
    found.unverified.clear()
    return found


def quarantined(store: Store, file: RemoteFile) -> Path:
    """Return the path to which a blob with a wrong digest is moved."""
    return store.final(file).with_name(f"{file.digest}{QUARANTINE}")


def wrong_ones(store: Store, files: list[RemoteFile], progress: ByteProgress, jobs: int) -> list[RemoteFile]:
    """Hash files that are here; return those with a wrong digest."""

    def is_wrong(file: RemoteFile) -> bool:
        with store.content(file).open("rb", buffering=0) as stream:
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
    except ValueError as error:
        raise impossible(error, store.snapshot(commit)) from None


def impossible(what: object, where: Path) -> KimiError:
    """Return the message for names in the cache that a repository cannot have."""
    problem = f"the cache has names that no repository can have: {what}"
    return KimiError(problem, where=str(where), remedy="find out where it comes from and remove it")


def _from_snapshot(store: Store, revision: str, commit: Commit) -> Manifest | None:
    """Make a manifest from the snapshot's links: each names its blob, and with it the digest."""
    folder = f"snapshots/{commit}/"
    links = {path.removeprefix(folder): to for path, to in store.links().items() if path.startswith(folder)}
    if not links:
        return None
    files = []
    for path, target in links.items():
        name = PurePosixPath(target).name
        file = RemoteFile(RepoPath(path), 0, Digest(name) if Digest.accepts(name) else None, len(name) == 64)
        files.append(replace(file, size=size(store.content(file)) or 0))
    # A weight shard that the index names and that was never fetched leaves no link. Its size is unknown.
    shards: set[str] = set()
    for index in (file for file in files if file.path == INDEX):
        with suppress(ValueError, KeyError, AttributeError, TypeError, RecursionError):
            shards = set(json.loads(read(store.content(index), MAX_INDEX) or b"")["weight_map"].values())
    files += [RemoteFile(RepoPath(shard), 0, None, True) for shard in sorted(shards - links.keys())]
    return Manifest(Listing(RepoName(store.repo), Revision(revision), commit, tuple(files)))


def size(path: Path) -> int | None:
    """Return the bytes of a plain file, or None. A link is not a plain file, wherever it leads."""
    with suppress(FileNotFoundError, NotADirectoryError):
        state = path.lstat()
        return state.st_size if stat.S_ISREG(state.st_mode) else None
    return None


def read(path: Path, limit: int) -> bytes | None:
    """Return at most `limit` bytes of a plain file, or None without one."""
    if size(path) is None:
        return None
    with path.open("rb", buffering=0) as stream:
        return stream.read(limit)


def write(path: Path, text: str) -> None:
    """Write a small file atomically. A link with its name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)


def _target(path: Path) -> str:
    """Return what a link leads to, as it is written, or an empty text."""
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115 - Path.readlink would normalize it
    return ""
