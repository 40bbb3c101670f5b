"""Fetch one repository: check the space, let huggingface_hub bring the files, compare every digest with the Hub's."""

from __future__ import annotations

import glob
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, tqdm, validate_repo_id
from huggingface_hub.utils._runtime import is_xet_available
from huggingface_hub.utils._xet import abort_xet_session

from ..base.errors import KimiError, UsageError
from ..base.files import shortage
from . import names
from .hub import RemoteFile, explain, failure, hub_client, list_files, scrub
from .progress import ByteProgress, ShowFile, counted_reads
from .snapshot import Snapshot

if TYPE_CHECKING:
    from huggingface_hub.utils._verification import FolderVerification

ATTEMPTS, PAUSE = 3, 5.0  # of a transfer that breaks, and the seconds between them


@dataclass(frozen=True)
class Repository:
    """A repository at one revision, and the cache that it goes to."""

    repo: str
    revision: str
    cache: Path
    kind: str = "model"

    @classmethod
    def named(cls, repo: str, revision: str, cache: Path, kind: str = "model") -> Repository:
        """Parse what a person typed, or a recipe says."""
        try:
            validate_repo_id(repo)
            return cls(repo, names.repository_path(revision, "revision"), cache, kind)
        except ValueError as error:
            what, expected = " ".join(str(error).split()), "owner/name, and a branch, tag or commit"
            raise UsageError(what, expected=expected, remedy="correct it") from None

    def __str__(self) -> str:
        return f"{self.repo} at {self.revision}"

    @property
    def folder(self) -> Path:
        return self.cache / repo_folder_name(repo_id=self.repo, repo_type=self.kind)

    def here(self) -> Snapshot | None:
        """Return the snapshot that an earlier download left, whole or not, without a request to the Hub."""
        place: dict[str, Any] = {"repo_type": self.kind, "cache_dir": self.cache}
        try:
            found = snapshot_download(
                self.repo, revision=self.revision, local_files_only=True, allow_patterns=[], **place
            )
            files = get_cached_repo_tree(self.repo, revision=Path(found).name, **place)
        except CachedRepoTreeNotFoundError:
            return Snapshot(Path(found), None)
        except (OSError, ValueError):
            return None
        return Snapshot(Path(found), {file.path: file.size for file in files})


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch, with the bytes that came and that were already here.

    `without_xet` is the reason why the transfer went on without Xet.
    """

    snapshot: Snapshot
    fetched: int
    kept: int
    without_xet: str


def fetch(wanted: Repository, show: ShowFile, jobs: int = 8, path: str | None = None) -> Fetched:
    """Bring a repository, or only its file `path`, with every digest compared; `jobs` files travel at once.

    A KimiError leaves the complete files in place, and the next call continues there.
    """
    without_xet = ""
    for _ in range(2):
        listing = list_files(wanted.repo, wanted.revision, wanted.kind)
        files = [file for file in listing.files if path in (None, file.path)]
        if not files:
            raise KimiError(f"{wanted.repo} has no {path} at revision {wanted.revision}", remedy="check the path")
        _remove_leftovers(wanted)
        needed = sum(file.size for file in _missing(replace(wanted, revision=listing.commit), files))
        if error := shortage(wanted.cache, needed, "choose another place with HF_HOME"):
            raise error
        with show(f"{wanted.repo} ({len(files)} files)", needed) as progress:
            snapshot, reason = _transfer(wanted, progress, jobs, path)
        without_xet = without_xet or reason
        wrong = [] if snapshot.verified else damaged(compare(wanted, snapshot, show))
        bad = [file.path for file in files if file.path in wrong or file.path not in snapshot.present]
        if not bad:
            return Fetched(snapshot, needed, sum(file.size for file in files) - needed, without_xet)
        constants.HF_HUB_DISABLE_XET = True  # its storage or its local cache may be what is wrong
    raise KimiError(
        f"{', '.join(bad)} arrived damaged twice: the digest is wrong",
        where=f"{wanted.repo} at {snapshot.commit}",
        expected="the content that the Hub describes",
        remedy="the bytes were deleted; look for a proxy that changes downloads, check RAM and disk, then repeat the "
        "command",
    )


def compare(wanted: Repository, snapshot: Snapshot, show: ShowFile) -> FolderVerification:
    """Hash the files that are here and compare them with the Hub's digests. Damaged files are deleted."""
    size = sum(snapshot.present.values())
    try:
        with show(f"hashing {wanted.repo}", size) as progress, counted_reads(progress), hub_client() as api:
            result = api.verify_repo_checksums(
                wanted.repo, repo_type=wanted.kind, revision=snapshot.commit, cache_dir=wanted.cache
            )
    except Exception as error:
        raise explain(error, str(wanted), wanted.folder) from None
    for path in damaged(result):
        snapshot.remove(path)
    if not result.mismatches:
        snapshot.mark_verified()
    return result


def damaged(result: FolderVerification) -> list[str]:
    """Return the paths of files with another digest than the Hub's."""
    return [mismatch["path"] for mismatch in result.mismatches]


def _missing(wanted: Repository, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files that have to come. One with the wrong size is deleted, because huggingface_hub would keep it."""
    snapshot, blobs = wanted.here(), wanted.folder / "blobs"
    present = snapshot.present if snapshot else {}
    for file in files:
        if snapshot and present.get(file.path, file.size) != file.size:
            snapshot.remove(file.path)
    sizes = {blob.name: blob.stat().st_size for blob in blobs.glob("*") if blob.is_file()}
    return [file for file in files if present.get(file.path, sizes.get(file.digest)) != file.size]


def _transfer(wanted: Repository, progress: ByteProgress, jobs: int, path: str | None) -> tuple[Snapshot, str]:
    """Let huggingface_hub bring all missing files, through broken connections, and without Xet if that fails."""
    stop, without_xet = threading.Event(), ""
    is_xet_available()  # huggingface_hub looks hf_xet up once, and says "no" to other threads meanwhile
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with hub_client(), _stopped_by_ctrl_c(stop):
                folder = snapshot_download(
                    wanted.repo,
                    repo_type=wanted.kind,
                    revision=wanted.revision,
                    cache_dir=wanted.cache,
                    endpoint=constants.ENDPOINT,
                    allow_patterns=None if path is None else glob.escape(path),
                    max_workers=jobs,
                    tqdm_class=_counting(progress, stop),
                )
            break
        except Exception as error:
            if isinstance(error, RuntimeError) and is_xet_available():  # hf_xet's
                without_xet = f"{type(error).__name__}: {scrub(error)}"
                constants.HF_HUB_DISABLE_XET = True
            elif attempt == ATTEMPTS or not _passing(error):
                raise explain(error, str(wanted), wanted.folder) from None
            else:
                time.sleep(PAUSE)
    here = replace(wanted, revision=Path(folder).name).here()
    return here or Snapshot(Path(folder), None), without_xet


def _passing(error: Exception) -> bool:
    """Return True for an error that the next attempt may not meet."""
    cause = failure(error)
    if isinstance(cause, HfHubHTTPError):  # 403: the signed address of a file expired
        return cause.response.status_code in (403, 408, 429, 500, 502, 503, 504)
    return isinstance(cause, httpx.TransportError) or (type(cause) is OSError and cause.errno is None)


@contextmanager
def _stopped_by_ctrl_c(stop: threading.Event) -> Iterator[None]:
    """End transfers at Ctrl-C. huggingface_hub would first finish the files that are on their way."""

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        abort_xet_session()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _counting(progress: ByteProgress, stop: threading.Event) -> type[tqdm]:
    """Return a class of bars for huggingface_hub that shows nothing itself and counts written bytes in `progress`."""

    class Counting(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise InterruptedError("stopped")
            if self._counts:
                progress.advance(int(n or 0))

    return Counting


def _remove_leftovers(wanted: Repository) -> None:
    """Delete partial files of downloads that were killed. A live download holds its file's lock."""
    locks = wanted.cache / ".locks" / wanted.folder.name
    for partial in wanted.folder.glob("blobs/*.incomplete"):
        with suppress(TimeoutError, OSError), WeakFileLock(locks / f"{partial.name.split('.')[0]}.lock", timeout=0.1):
            partial.unlink()
