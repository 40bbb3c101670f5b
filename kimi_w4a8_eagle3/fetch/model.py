"""Files of a repository at one commit, and how their content is hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO

from .names import Commit, Digest, RepoName, RepoPath, Revision

MAX_FILE = 16 << 40  # the largest file of ext4
MAX_FILES = 20_000


@dataclass(frozen=True)
class RemoteFile:
    """One file. Values that cannot be right raise ValueError.

    `digest` is the SHA-256 of the content for a file in large-file storage (`lfs`) and git's blob id for a small one:
    SHA-1 over a header and the content. It also names the blob in the Hugging Face cache. None: unknown here.
    `xet` is the file's hash in Xet storage, if it is there.
    """

    path: RepoPath
    size: int
    digest: Digest | None
    lfs: bool
    xet: Digest | None = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE:
            raise ValueError(f"{ascii(self.size)[:40]} is not a file size ({self.path})")
        if self.digest is not None and self.lfs != (len(self.digest) == 64):
            raise ValueError(f"a digest of {len(self.digest)} digits does not go with lfs={self.lfs} ({self.path})")

    def hash_of(self, stream: BinaryIO, advance: Callable[[int], None] = lambda count: None) -> str:
        """Return the digest of a local file, of the same kind as `digest`, in blocks of 4 MiB."""
        header = b"blob %d\0" % self.size
        hasher = hashlib.sha256() if self.lfs else hashlib.sha1(header, usedforsecurity=False)
        while block := stream.read(4 << 20):
            hasher.update(block)
            advance(len(block))
        return hasher.hexdigest()


@dataclass(frozen=True)
class Listing:
    """All files of `repo` at `commit`. `revision` is the branch, tag or commit that was asked for.

    No two files claim one place, and one digest has one size. Any other listing raises ValueError.
    """

    repo: RepoName
    revision: Revision
    commit: Commit
    files: tuple[RemoteFile, ...]

    def __post_init__(self) -> None:
        if len(self.files) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} files")
        paths: set[str] = set()
        sizes: dict[str, int] = {}
        for file in self.files:
            if file.path in paths:
                raise ValueError(f"{file.path} is listed twice")
            paths.add(file.path)
            if file.digest is not None and sizes.setdefault(file.digest, file.size) != file.size:
                raise ValueError(f"{file.path} has the digest of a file of another size")
        for path in paths:
            if folder := next((str(above) for above in PurePosixPath(path).parents if str(above) in paths), None):
                raise ValueError(f"{folder} is a file and the folder of {path}")

    @property
    def size(self) -> int:
        """Bytes of the whole repository."""
        return sum(file.size for file in self.files)


def human(size: float) -> str:
    """Format bytes in decimal units, as disks and the Hub count: `533.6 GB`, `6.1 GB`, `512 B`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
