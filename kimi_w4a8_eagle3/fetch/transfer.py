"""Bring one file: continue where an earlier attempt stopped, hash while it streams, keep it only if it is right.

huggingface_hub downloads to a name that is unique per process and deletes it on failure, so a killed download of an
8 GB shard starts again at zero. Here the bytes lie under a stable name and the rest is asked for with a Range header.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from ..base.errors import KimiError
from .hub import RETRY_STATUS, Hub
from .model import Hasher, Listing, RemoteFile, feed, human
from .tree import Tree


class Stopped(Exception):
    """The fetch was asked to stop; the bytes so far are kept."""


class FileFailed(KimiError):
    """One file cannot be had; the others still can."""


class Corrupt(Exception):
    """The bytes that came are not the file that the Hub describes."""


@dataclass
class _Arrived:
    """The part of a file that is on disk: an append position and the hash up to it."""

    file: RemoteFile
    stream: BinaryIO
    advance: Callable[[int], None]
    hasher: Hasher
    offset: int = 0

    def resume(self) -> None:
        """Hash what an earlier attempt left, unless it is longer than the file can be."""
        if os.fstat(self.stream.fileno()).st_size > self.file.size:
            self.stream.truncate(0)
        self.stream.seek(0)
        self.offset = feed(self.hasher, self.stream, self.advance)

    def write(self, data: bytes) -> None:
        """Append bytes; Corrupt when the file would grow beyond its size."""
        if self.offset + len(data) > self.file.size:
            raise Corrupt(f"more than {self.file.size} bytes")
        rest = memoryview(data)
        while rest:  # an unbuffered write takes what still fits and says how much; only the next one fails
            rest = rest[self.stream.write(rest) :]
        self.hasher.update(data)
        self.offset += len(data)
        self.advance(len(data))

    def start_over(self) -> None:
        """Drop everything that came so far."""
        self.advance(-self.offset)
        self.stream.truncate(0)
        self.hasher, self.offset = self.file.hasher(), 0


@dataclass(frozen=True)
class Transfer:
    """What all files of one repository's fetch share."""

    hub: Hub
    listing: Listing
    client: httpx.Client
    stop: threading.Event
    advance: Callable[[int], None]

    def bring(self, file: RemoteFile, tree: Tree, partial: Path, final: Path) -> None:
        """Download `file` to `partial`, both places in `tree`, check its digest, rename it to `final`.

        A wrong digest discards the bytes and tries once more from zero (a resumed part may have been damaged).
        Raises KimiError when that fails too, when the Hub refuses, or when the disk is full; Stopped when asked to.
        """
        for last in (False, True):
            try:
                with tree.appending(partial) as stream:
                    self._stream_all(file, stream)
                tree.replace(partial, final)
                return
            except Corrupt as error:
                tree.unlink(partial)
                if last:
                    raise FileFailed(
                        f"{file.path} arrived damaged twice: {error}",
                        where=f"{self.listing.repo} at {self.listing.commit}",
                        expected="the content that the Hub describes",
                        remedy="the bytes were deleted; look for a proxy that changes downloads, check RAM and disk, "
                        "then repeat the command",
                    ) from None
            except OSError as error:
                raise disk_error(error, partial) from None

    def _stream_all(self, file: RemoteFile, stream: BinaryIO) -> None:
        """Stream until the file is complete and its digest right; Corrupt when it is not what the Hub describes."""
        arrived = _Arrived(file, stream, self.advance, file.hasher())
        arrived.resume()
        try:
            self._stream_rest(arrived)
            if (digest := arrived.hasher.hexdigest()) != file.digest:
                raise Corrupt(f"digest {digest} instead of {file.digest}")
        except Corrupt:
            arrived.start_over()
            raise
        os.fsync(stream.fileno())

    def _stream_rest(self, arrived: _Arrived) -> None:
        """Ask for the missing bytes until they are here, through broken connections and rate limits."""
        file, failures = arrived.file, 0
        while arrived.offset < file.size:
            before, busy = arrived.offset, None
            try:
                busy = self._stream_once(arrived)
                problem = f"HTTP {busy.status_code}" if busy else "the connection ended early"
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            if arrived.offset == file.size:
                return
            failures = 1 if arrived.offset - before >= self.hub.limits.least else failures + 1
            if failures >= self.hub.backoff.attempts:
                raise self._gave_up(file, arrived.offset, problem)
            if self.hub.wait(failures, busy.headers if busy else None, self.stop.wait):
                raise Stopped

    def _stream_once(self, arrived: _Arrived) -> httpx.Response | None:
        """One request for the missing bytes. Returns an answer that is worth repeating, else None."""
        file = arrived.file
        headers = {"range": f"bytes={arrived.offset}-"} if arrived.offset else {}
        url = self.hub.url(self.listing.repo, self.listing.commit, file.path)
        with self.hub.get(self.client, url, headers) as response:
            status = response.status_code
            # A signed storage address may expire between redirect and request: ask the Hub for a new one.
            expired = status == 403 and response.url.host != httpx.URL(self.hub.endpoint).host
            if status in RETRY_STATUS or expired:
                return response
            if status == 416:
                raise Corrupt(f"the server has no bytes from {arrived.offset} on")
            if status not in (200, 206):
                raise self.hub.refusal(status, self.listing.repo, self.listing.commit, file.path)
            if status == 206:
                _check_range(response, arrived.offset)
            elif arrived.offset:
                arrived.start_over()  # the server ignored the range and sends the whole file
            for data in self.hub.limits.steady(response.iter_raw()):
                if self.stop.is_set():
                    raise Stopped
                arrived.write(data)
        return None

    def _gave_up(self, file: RemoteFile, offset: int, problem: str) -> FileFailed:
        return FileFailed(
            f"{file.path}: no progress in {self.hub.backoff.attempts} attempts: {self.hub.scrub(problem)}",
            where=self.hub.scrub(self.hub.url(self.listing.repo, self.listing.commit, file.path)),
            remedy=f"{human(offset)} of {human(file.size)} are kept; repeat the command and it continues there",
        )


def _check_range(response: httpx.Response, offset: int) -> None:
    """A partial answer must start where our bytes end."""
    match = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    if not match or int(match.group(1)) != offset:
        raise Corrupt(f"asked for bytes from {offset}, got {response.headers.get('content-range')!r}")


def disk_error(error: OSError, path: Path) -> KimiError:
    """The message for a disk that takes no more."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return KimiError(
            "the disk is full",
            where=str(path.parent),
            remedy="free space, or choose another place with HF_HOME; what came so far is kept",
        )
    return KimiError(f"cannot write: {error.strerror}", where=str(path), remedy="check the directory's permissions")
