"""Files below one folder. No symbolic link below it is followed.

A link that an earlier attack left there cannot lead a read, write, rename or removal out of the folder. The folder
itself is what the user named, and may be reached by links.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..base.errors import KimiError
from ..base.files import write_atomic

_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class NotPlain(KimiError):
    """Something that is no plain file or folder lies where one is expected."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path.name} is {'a symbolic link' if path.is_symlink() else 'no plain file'}",
            where=str(path),
            expected="plain files and folders: no link is followed below the cache folder",
            remedy="find out where it comes from and remove it; to keep files elsewhere, name that place with HF_HOME",
        )


@dataclass(frozen=True)
class Tree:
    """The files below `base`. A path that does not begin with `base` is a ValueError."""

    base: Path

    def at(self, path: Path, create: bool = False) -> Path:
        """Return `path` if no folder between `base` and it is a link, else raise NotPlain."""
        parts = path.relative_to(self.base).parts
        if not parts or ".." in parts:
            raise ValueError(f"{path} is not below {self.base}")
        folder = self.base
        for part in ("", *parts[:-1]):
            folder = folder / part
            if part and folder.is_symlink():
                raise NotPlain(folder)
            if create:
                folder.mkdir(parents=not part, exist_ok=True)
        return path

    def size(self, path: Path) -> int | None:
        """Return the bytes of a plain file, or None. A link is not a plain file, wherever it leads."""
        with suppress(*_NOT_THERE, NotPlain):
            state = self.at(path).lstat()
            return state.st_size if stat.S_ISREG(state.st_mode) else None
        return None

    def open(self, path: Path) -> BinaryIO:
        """Open a plain file to read, unbuffered. FileNotFoundError or NotPlain when there is none."""
        return os.fdopen(self._descriptor(path, os.O_RDONLY), "rb", buffering=0)

    def _descriptor(self, path: Path, flags: int) -> int:
        path = self.at(path, create=bool(flags & os.O_CREAT))
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise NotPlain(path)
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)

    def append(self, path: Path) -> int:
        """Return the descriptor of a file to read and to append to; create it if needed.

        A link and a file with a second name (a hard link) are removed first, because their content is not ours.
        """
        with suppress(FileNotFoundError):
            state = self.at(path).lstat()
            if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
                path.unlink()
        return self._descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def read(self, path: Path, limit: int) -> bytes | None:
        """Return at most `limit` bytes of a file, or None without one."""
        with suppress(*_NOT_THERE, NotPlain), self.open(path) as stream:
            return stream.read(limit)
        return None

    def write(self, path: Path, text: str) -> None:
        """Write a small file atomically."""
        write_atomic(self.at(path, create=True), text)

    def replace(self, old: Path, new: Path) -> None:
        """Rename `old` to `new`. A link at `new` is replaced itself, not what it leads to."""
        self.at(old).replace(self.at(new, create=True))

    def unlink(self, path: Path) -> None:
        """Remove a file or a link, if there is one."""
        with suppress(*_NOT_THERE):
            self.at(path).unlink()

    def readlink(self, path: Path) -> str | None:
        """Return the target of a symbolic link as it is written, or None."""
        with suppress(OSError, NotPlain):
            return os.readlink(self.at(path))  # noqa: PTH115 - Path.readlink would normalize it
        return None

    def leads(self, path: Path, target: Path) -> bool:
        """Return True if `path` is what `link` makes."""
        return self.readlink(path) == os.path.relpath(target, path.parent)

    def link(self, target: Path, path: Path) -> None:
        """Make a relative link, so that the folder can be moved."""
        if not self.leads(path, target):
            self.unlink(path)
            self.at(path, create=True).symlink_to(os.path.relpath(target, path.parent))

    def links(self, path: Path) -> dict[str, str]:
        """Return the targets of all symbolic links below a folder, by their paths in it."""
        found: dict[str, str] = {}
        with suppress(*_NOT_THERE, NotPlain):
            # By descriptors, because paths in a hostile cache may be too long for one call.
            for folder, _, names, fd in os.fwalk(self.at(path / "x").parent, follow_symlinks=False):
                for name in names:
                    with suppress(OSError):  # no link
                        found[os.path.relpath(f"{folder}/{name}", path)] = os.readlink(name, dir_fd=fd)
        return dict(sorted(found.items()))

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder; none when there is no folder."""
        with suppress(*_NOT_THERE, NotPlain):
            return sorted(entry.name for entry in self.at(path / "x").parent.iterdir())
        return []

    @contextmanager
    def lock(self, path: Path, busy: KimiError) -> Iterator[None]:
        """Hold a lock file; raise `busy` when another process holds it. The lock dies with its process."""
        with os.fdopen(self._descriptor(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            yield
