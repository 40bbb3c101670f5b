"""Fetch one repository: list it, check what is on the disk and the space, and let huggingface_hub bring the rest.

huggingface_hub's own download to its cache checks no digest. So its `http_get` and hf_xet write to a folder beside the
cache's blobs, and a file becomes a blob only when its digest is right.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import XetFileData, silent_tqdm
from huggingface_hub.utils._runtime import is_xet_available
from huggingface_hub.utils._xet import abort_xet_session, get_xet_session, refresh_xet_connection_info

from ..base.errors import KimiError
from ..base.files import shortage
from .audit import FILE_HEADERS, RETRY_STATUS, Stopped
from .cache import Manifest, Store, quarantined, survey, wrong_ones
from .hub import STRANGE, Hub
from .model import Listing, RemoteFile
from .progress import ByteProgress, Show

if TYPE_CHECKING:
    from typing_extensions import Buffer as ReadableBuffer


class FileFailed(KimiError):
    """One file did not arrive; the others still can."""


class Corrupt(Exception):
    """The bytes that came are not the file that the Hub describes."""


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch: the folder to serve from, and the bytes that came and that were already here.

    `without_xet` is the reason why Xet was not used although the repository is in Xet storage.
    """

    folder: Path
    listing: Listing
    fetched: int
    kept: int
    without_xet: str


def fetch(
    hub: Hub, store: Store, repo: str, revision: str, show: Show, jobs: int = 8, path: str | None = None
) -> Fetched:
    """Bring `repo` at `revision`, or only its file `path`, into `store`, with every digest checked.

    `jobs` files travel at once. A KimiError leaves the complete files in place, and the next call continues there.
    """
    listing = hub.listing(repo, revision, path)
    with store.exclusive():
        manifest = Manifest(listing, store.vouched(listing))
        store.save(manifest)
        store.remember(listing)
        _check_existing(store, manifest, show, jobs)
        # Two paths with the same content share a blob.
        missing = list({file.digest: file for file in survey(store, manifest).missing}.values())
        needed = sum(file.size for file in missing)
        if error := shortage(store.root, needed, "choose another place with HF_HOME"):
            raise error
        without_xet = _bring(hub, store, manifest, missing, show, jobs) if missing else ""
        manifest.verified = {file.path for file in listing.files}
        store.save(manifest)
        return Fetched(store.finish(listing), listing, needed, listing.size - needed, without_xet)


def _check_existing(store: Store, manifest: Manifest, show: Show, jobs: int) -> None:
    """Hash files that are here and were never verified. A wrong one is removed, and so fetched anew."""
    unverified = survey(store, manifest).unverified
    if not unverified:
        return
    label = f"checking {len(unverified)} files that are already here"
    with show(label, sum(file.size for file in unverified)) as progress:
        wrong = wrong_ones(store, unverified, progress, jobs)
    manifest.verified |= {file.path for file in unverified if file not in wrong}
    for file in wrong:
        store.final(file).unlink(missing_ok=True)


def _bring(hub: Hub, store: Store, manifest: Manifest, files: list[RemoteFile], show: Show, jobs: int) -> str:
    """Transfer files in parallel. One failed file lets the others finish, unless the failure concerns them all."""
    lock = threading.Lock()
    label = f"{manifest.listing.repo} ({len(files)} files)"
    with show(label, sum(file.size for file in files)) as progress:
        transfer = Transfer(hub, store, manifest.listing, progress)

        def bring(file: RemoteFile) -> None:
            try:
                transfer.bring(file)
            except FileFailed:
                raise
            except BaseException:  # a refusal or a full disk would hit every other file too
                transfer.stop.set()
                raise
            with lock:
                manifest.verified.add(file.path)
                store.save(manifest)
            quarantined(store, file).unlink(missing_ok=True)

        with hub.audited(transfer.stop), ThreadPoolExecutor(max_workers=jobs) as pool:
            # Large files first, so that the last minutes are not one long file on one connection.
            futures = [pool.submit(bring, file) for file in sorted(files, key=lambda file: -file.size)]
            try:
                wait(futures)
            except BaseException:  # Ctrl-C
                transfer.stop.set()
                abort_xet_session()
                raise
    errors = [error for future in futures if (error := future.exception()) and not isinstance(error, Stopped)]
    if not errors:
        return transfer.without_xet if any(file.xet for file in files) else ""
    if len(errors) > 1 and isinstance(errors[0], KimiError):
        errors[0].what += f" (and {len(errors) - 1} more files failed)"
    raise errors[0]


@dataclass
class Transfer:
    """State that all files of a repository's fetch share. Xet is used until it fails, see `without_xet`."""

    hub: Hub
    store: Store
    listing: Listing
    progress: ByteProgress
    stop: threading.Event = field(default_factory=threading.Event)
    without_xet: str = field(
        default_factory=lambda: "" if is_xet_available() else "hf_xet is not installed, or HF_HUB_DISABLE_XET is set"
    )

    def bring(self, file: RemoteFile) -> None:
        """Bring `file` to its place in the store: by Xet if it is there, else by plain HTTP; KimiError if both fail."""
        path, problem = self.store.incoming / str(file.digest), ""
        by_xet = [self._receive_by_xet] if file.xet and not self.without_xet else []
        for receive in (*by_xet, self._receive_by_http, self._receive_by_http):
            if self.stop.is_set():
                raise Stopped
            try:
                with Arriving(path, file.size, self.progress) as arriving:
                    receive(file, arriving)
                    arriving.flush()
                with path.open("rb+", buffering=0) as arrived:
                    if (digest := file.hash_of(arrived)) != file.digest:
                        raise Corrupt(f"digest {digest} instead of {file.digest}")
                    os.fsync(arrived.fileno())
                return self.store.place(path, file)
            except Corrupt as error:
                arriving.count(0)
                problem = str(error)
            except OSError as error:
                raise disk_error(error, path) from None
            finally:
                path.unlink(missing_ok=True)
        raise FileFailed(
            f"{file.path} arrived damaged twice: {problem}",
            where=f"{self.listing.repo} at {self.listing.commit}",
            expected="the content that the Hub describes",
            remedy="the bytes were deleted; look for a proxy that changes downloads, check RAM and disk, then repeat "
            "the command",
        )

    def _receive_by_xet(self, file: RemoteFile, arriving: Arriving) -> None:
        """Let hf_xet write the file. Its requests are not audited, so it gets the storage's short-lived token only."""
        from hf_xet import XetFileInfo  # not on every platform

        assert file.xet is not None
        route = f"{self.hub.endpoint}/api/{self.hub.kind}s/{self.listing.repo}/xet-read-token/{self.listing.commit}"
        try:
            storage = refresh_xet_connection_info(file_data=XetFileData(file.xet, route), headers={})
            with get_xet_session().new_file_download_group(
                endpoint=storage.endpoint,
                token=storage.access_token,
                token_expiry_unix_secs=storage.expiration_unix_epoch,
                progress_callback=lambda report, files: arriving.count(report.total_bytes_completed),
            ) as group:
                group.start_download_file(XetFileInfo(file.xet, file.size), str(arriving.name))
        except Exception as error:  # hf_xet raises RuntimeError for most
            if self.stop.is_set():
                raise Stopped from None
            self.without_xet = f"{type(error).__name__}: {self.hub.scrub(error)}"
            raise Corrupt(self.without_xet) from None

    def _receive_by_http(self, file: RemoteFile, arriving: Arriving) -> None:
        """Let huggingface_hub write the file, through broken connections."""
        repo, commit = self.listing.repo, self.listing.commit
        url = self.hub.url(repo, commit, file.path)
        try:
            return http_get(url, arriving, headers=FILE_HEADERS, expected_size=file.size, tqdm_class=silent_tqdm)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in RETRY_STATUS:
                raise self.hub.explain(error, repo, commit, file.path) from None
            problem = f"HTTP {status}"
        except httpx.RequestError as error:
            problem = f"{type(error).__name__}: {error}"
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of a body that ended early
                raise
            problem = "the connection ended early"
        except STRANGE as error:
            raise self.hub.explain(error, repo, commit, file.path) from None
        raise FileFailed(
            f"{file.path}: no progress in repeated attempts: {self.hub.scrub(problem)}",
            where=self.hub.scrub(url),
            remedy="repeat the command; complete files are kept",
        )


class Arriving(io.BufferedRandom):
    """A new file that refuses more than `size` bytes and counts its length in the progress."""

    def __init__(self, path: Path, size: int, progress: ByteProgress) -> None:
        super().__init__(io.FileIO(path, "x+"))
        self._size, self._progress, self._counted = size, progress, 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Append bytes; raise Corrupt if the file would be too long."""
        if self.tell() + memoryview(data).nbytes > self._size:
            raise Corrupt(f"more than {self._size} bytes")
        written = super().write(data)
        self.count(self.tell())
        return written

    def count(self, length: int) -> None:
        """Show `length` bytes of this file in the progress; fewer than before if they turned out wrong."""
        self._progress.advance(length - self._counted)
        self._counted = length


def disk_error(error: OSError, path: Path) -> KimiError:
    """Return the message for a disk that takes no more."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return KimiError(
            "the disk is full",
            where=str(path.parent),
            remedy="free space, or choose another place with HF_HOME; complete files are kept",
        )
    return KimiError(f"cannot write: {error.strerror}", where=str(path), remedy="check the directory's permissions")
