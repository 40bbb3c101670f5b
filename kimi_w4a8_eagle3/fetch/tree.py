"""Files below one folder, and nothing else: each is reached part by part from a descriptor of that folder.

No symbolic link below the folder is followed, so a link that another user or an earlier attack left there cannot lead
a read, write, rename or removal out of it. The folder itself is what the user named, and may be reached by links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..base.errors import KimiError

# For every open below the folder. O_NONBLOCK: a named pipe that somebody put there must not wait for its other end.
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class NotPlain(KimiError):
    """Something that is no plain file or folder lies where one is expected."""


@dataclass(frozen=True)
class Tree:
    """The files below `base`. Every path that a method takes must begin with `base`; ValueError for any other."""

    base: Path

    def size(self, path: Path) -> int | None:
        """Bytes of a plain file; None when there is none (also for a link, wherever it leads)."""
        state = self._state(path)
        return state.st_size if state else None

    @contextmanager
    def reading(self, path: Path) -> Iterator[BinaryIO]:
        """A plain file, unbuffered; FileNotFoundError or NotPlain when there is none."""
        with self._parent(path) as (folder, name):
            stream = _plain(self._open(path, name, os.O_RDONLY, folder), path)
        with stream:
            yield stream

    def read(self, path: Path, limit: int) -> bytes | None:
        """The content of a small file; None when there is none, ValueError when it is longer than `limit` bytes."""
        try:
            with self.reading(path) as stream:
                if os.fstat(stream.fileno()).st_size > limit:
                    raise ValueError(f"larger than {limit} bytes")
                return stream.read(limit)
        except (*_NOT_THERE, NotPlain):
            return None

    @contextmanager
    def appending(self, path: Path) -> Iterator[BinaryIO]:
        """A file to read and to append to, unbuffered, made if need be.

        A link, and a file that has another name elsewhere (a hard link), are removed first: their content is not ours.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        with self._parent(path, create=True) as (folder, name):
            with suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
                    os.unlink(name, dir_fd=folder)
            stream = _plain(self._open(path, name, flags, folder), path)
        with stream:
            if os.fstat(stream.fileno()).st_nlink > 1:  # put there since we looked
                raise _not_plain("also another file's name", path)
            yield stream

    def write(self, path: Path, text: str) -> None:
        """Write a small file at once: a new name, then a rename over the old."""
        with self._parent(path, create=True) as (folder, name):
            temporary = f"{name[:200]}.{secrets.token_hex(8)}.tmp"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS, 0o666, dir_fd=folder)
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise

    def replace(self, old: Path, new: Path) -> None:
        """Rename `old` to `new`; a file or a link that is there goes, not what it leads to."""
        with self._parent(old) as (source, name), self._parent(new, create=True) as (folder, final):
            os.replace(name, final, src_dir_fd=source, dst_dir_fd=folder)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link, if there is one."""
        with suppress(FileNotFoundError), self._parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def readlink(self, path: Path) -> str | None:
        """Where a symbolic link leads, as it is written; None when `path` is none."""
        try:
            with self._parent(path) as (folder, name):
                return os.readlink(name, dir_fd=folder)
        except (OSError, NotPlain):
            return None

    def link(self, target: Path, path: Path) -> None:
        """A relative link, so that the folder can be moved; a hard link where the file system has no symbolic ones."""
        if self.leads(path, target):
            return
        written = os.path.relpath(target, path.parent)
        with self._parent(path, create=True) as (folder, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            try:
                os.symlink(written, name, dir_fd=folder)
            except OSError:
                with self._parent(target) as (source, original):
                    os.link(original, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)

    def leads(self, path: Path, target: Path) -> bool:
        """Whether `path` is what `link` makes: a relative link to `target`, or another name of it."""
        written = os.path.relpath(target, path.parent)
        return self.readlink(path) == written or self._identity(path) == self._identity(target) is not None

    def links(self, path: Path) -> dict[str, str]:
        """Every symbolic link below a folder: its path in there, and where it leads, as it is written."""
        found: dict[str, str] = {}
        try:
            with self._parent(path / "x") as (top, _):
                for folder, _, names, fd in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                    for name in names:
                        with suppress(OSError):  # no link
                            found[os.path.normpath(f"{folder}/{name}")] = os.readlink(name, dir_fd=fd)
        except (*_NOT_THERE, NotPlain):
            return {}
        return dict(sorted(found.items()))

    def names(self, path: Path) -> list[str]:
        """What lies in a folder; nothing when there is none."""
        try:
            with self._parent(path / "x") as (folder, _):
                return sorted(os.listdir(folder))  # noqa: PTH208 - of a descriptor
        except (*_NOT_THERE, NotPlain):
            return []

    @contextmanager
    def lock(self, path: Path, busy: KimiError) -> Iterator[None]:
        """Hold a lock file; raises `busy` when another process holds it. The lock dies with its process."""
        with self._parent(path, create=True) as (folder, name):
            stream = _plain(self._open(path, name, os.O_RDWR | os.O_CREAT, folder), path)
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            yield

    def _state(self, path: Path) -> os.stat_result | None:
        """What is known about a plain file; None when there is none."""
        try:
            with self._parent(path) as (folder, name):
                state = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except (*_NOT_THERE, NotPlain):
            return None
        return state if stat.S_ISREG(state.st_mode) else None

    def _identity(self, path: Path) -> tuple[int, int] | None:
        state = self._state(path)
        return (state.st_dev, state.st_ino) if state else None

    @contextmanager
    def _parent(self, path: Path, create: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that `path` lies in, and its name in there."""
        *folders, name = self._parts(path)
        if create:
            self.base.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY)
        try:
            way = self.base
            for folder in folders:
                way = way / folder
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=fd)
                inner = self._open(way, folder, os.O_RDONLY | os.O_DIRECTORY, fd)
                os.close(fd)
                fd = inner
            yield fd, name
        finally:
            os.close(fd)

    def _parts(self, path: Path) -> tuple[str, ...]:
        parts = path.relative_to(self.base).parts
        if not parts or ".." in parts:
            raise ValueError(f"{path} is not below {self.base}")
        return parts

    @staticmethod
    def _open(path: Path, name: str, flags: int, folder: int) -> int:
        """Open `name` in `folder`; NotPlain for a symbolic link."""
        try:
            return os.open(name, flags | _ALWAYS, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, folder):
                raise _not_plain("a symbolic link", path) from None
            raise


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _plain(fd: int, path: Path) -> BinaryIO:
    """A stream of the descriptor, if it is one of a plain file."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain("no plain file", path)
    return os.fdopen(fd, "rb" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY else "r+b", buffering=0)


def _not_plain(what: str, path: Path) -> NotPlain:
    return NotPlain(
        f"{path.name} is {what}",
        where=str(path),
        expected="plain files and folders: no link is followed below the place that was named",
        remedy="look who put it there and remove it; to keep files elsewhere, name that place with HF_HOME",
    )
