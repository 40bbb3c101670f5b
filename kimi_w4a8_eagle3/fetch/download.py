"""Fetch one repository: list, compare with the disk, check the space, bring the missing files in parallel."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import KimiError
from .hub import Hub
from .manifest import Manifest
from .model import Listing, RemoteFile, human
from .store import Store, arrived, exclusive
from .transfer import FileFailed, Stopped, Transfer
from .verify import QUARANTINE, hashed, survey

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Result:
    """What a fetch did: the directory to serve from, the commit, and the bytes that were already there."""

    folder: Path
    listing: Listing
    fetched: int
    kept: int


def fetch(
    hub: Hub, store: Store, repo: str, revision: str, show: Show, jobs: int = 8, reserve: int = 1 << 30
) -> Result:
    """Bring `repo` at `revision` into `store`, completely and with every digest checked.

    `jobs` files travel at once; `reserve` bytes of the file system stay free. Raises KimiError with what is wrong;
    what arrived until then is kept, and the next call continues there.
    """
    listing = hub.listing(repo, revision)
    with exclusive(store):
        path = store.manifest_path(listing.commit)
        manifest = Manifest(listing, _vouched(store, listing))
        manifest.save(store.tree, path)
        store.remember(listing)
        _check_existing(store, manifest, show, jobs)
        missing = _distinct(survey(store, manifest).missing, store)
        kept = sum(arrived(store, file) for file in missing)
        needed = sum(file.size for file in missing)
        check_space(store.root, needed - kept, reserve)
        if missing:
            _bring(hub, store, manifest, missing, show, jobs)
        manifest.verified = {file.path for file in listing.files}
        manifest.save(store.tree, path)
        return Result(store.finish(listing), listing, needed - kept, listing.size - (needed - kept))


def check_space(folder: Path, needed: int, reserve: int) -> None:
    """KimiError unless the file system of `folder` takes `needed` more bytes and keeps `reserve` free."""
    if needed <= 0:
        return
    free = shutil.disk_usage(folder).free
    if free < needed + reserve:
        raise KimiError(
            f"not enough disk space: {human(needed)} to fetch, {human(free)} free",
            where=str(folder),
            expected=f"{human(needed + reserve)} free ({human(reserve)} of it stays free)",
            remedy="free space, or choose another place with HF_HOME",
        )


def _vouched(store: Store, listing: Listing) -> set[str]:
    """The paths whose content was hashed here before, for this commit or another one: same place, same digest."""
    known = {(store.final(f), f.digest) for m in store.manifests() for f in m.listing.files if f.path in m.verified}
    return {file.path for file in listing.files if (store.final(file), file.digest) in known}


def _check_existing(store: Store, manifest: Manifest, show: Show, jobs: int) -> None:
    """Hash files that are here but that nobody vouches for; a wrong one is fetched anew."""
    doubtful = survey(store, manifest).unverified
    if not doubtful:
        return
    label = f"checking {len(doubtful)} files that are already here"
    with show(label, sum(file.size for file in doubtful)) as advance:
        right, wrong = hashed(store, doubtful, advance, jobs)
    manifest.verified |= {file.path for file in right}
    for file in wrong:
        store.tree.unlink(store.final(file))


def _bring(hub: Hub, store: Store, manifest: Manifest, files: list[RemoteFile], show: Show, jobs: int) -> None:
    """Transfer files in parallel; one file's failure lets the others finish, unless it concerns them all."""
    stop, lock = threading.Event(), threading.Lock()
    label = f"{manifest.listing.repo} ({len(files)} files)"
    with hub.client() as client, show(label, sum(file.size for file in files)) as advance:
        transfer = Transfer(hub, manifest.listing, client, stop, advance)

        def bring(file: RemoteFile) -> None:
            if stop.is_set():
                raise Stopped
            final = store.final(file)
            transfer.bring(file, store.tree, store.partial(file), final)
            with lock:
                manifest.verified.add(file.path)
                manifest.save(store.tree, store.manifest_path(manifest.listing.commit))
            store.tree.unlink(final.with_name(final.name + QUARANTINE))

        pool = ThreadPoolExecutor(max_workers=jobs)
        # Large files first, so that the last minutes are not one long file on one connection.
        futures = [pool.submit(bring, file) for file in sorted(files, key=lambda file: -file.size)]
        try:
            _settle(futures, stop)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    _raise_first(futures)


def _settle(futures: list[Future[None]], stop: threading.Event) -> None:
    """Wait for all; a refusal or a full disk would hit every other file too and stops them."""
    open_futures = set(futures)
    while open_futures:
        done, open_futures = wait(open_futures, timeout=0.5)
        errors = [future.exception() for future in done if not future.cancelled()]
        if any(error is not None and not isinstance(error, FileFailed) for error in errors):
            stop.set()


def _raise_first(futures: list[Future[None]]) -> None:
    """Raise the first real error; mention the others by count."""
    errors = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    real = [error for error in errors if not isinstance(error, Stopped)]
    if not real:
        return
    error = real[0]
    if len(real) > 1 and isinstance(error, KimiError):
        error.what += f" (and {len(real) - 1} more files failed)"
    raise error


def _distinct(files: list[RemoteFile], store: Store) -> list[RemoteFile]:
    """One file per place: two paths with the same content share a blob in the cache."""
    return list({store.final(file): file for file in files}.values())
