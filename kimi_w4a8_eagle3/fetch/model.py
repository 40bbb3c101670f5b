"""What a repository holds: the facts that every step of a fetch agrees on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Hasher(Protocol):
    """The part of a `hashlib` object that a download needs."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The digest so far, in hexadecimal."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository at one commit.

    `digest` is the SHA-256 of the content for a file in large-file storage (`lfs`), and git's blob id (SHA-1 over a
    header and the content) for a small one. It is also the name of the blob in the Hugging Face cache.
    """

    path: str
    size: int
    digest: str
    lfs: bool

    def hasher(self) -> Hasher:
        """A fresh hasher whose `hexdigest` over the whole content equals `digest`."""
        if self.lfs:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    def hash_of(self, path: Path, advance: Callable[[int], None] = lambda n: None) -> str:
        """The digest of a local file, in the same kind as `digest`."""
        hasher = self.hasher()
        feed(hasher, path, advance)
        return hasher.hexdigest()


@dataclass(frozen=True)
class Listing:
    """All files of `repo` at `commit`; `revision` is the name that was asked for (a branch, a tag or the commit)."""

    repo: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole repository."""
        return sum(file.size for file in self.files)


def feed(hasher: Hasher, path: Path, advance: Callable[[int], None] = lambda n: None) -> int:
    """Feed a file to `hasher` in blocks of 4 MiB and return its length in bytes."""
    length = 0
    with path.open("rb") as stream:
        while block := stream.read(4 << 20):
            hasher.update(block)
            length += len(block)
            advance(len(block))
    return length


def human(size: float) -> str:
    """Bytes as people write them: `497.0 GB`, `6.1 GB`, `512 B` (decimal units, as disks and the Hub count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
