"""Check what is on disk: is every file there, and does its content match its digest?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .manifest import Manifest
from .model import RemoteFile
from .store import Store

QUARANTINE = ".corrupt"


@dataclass
class Report:
    """The files of one repository by their state on this machine."""

    manifest: Manifest
    missing: list[RemoteFile] = field(default_factory=list)
    corrupt: list[RemoteFile] = field(default_factory=list)
    unverified: list[RemoteFile] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Everything is there; `unverified` files have the right size and were not hashed."""
        return not self.missing and not self.corrupt

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files that are missing or corrupt."""
        return sum(file.size for file in self.missing + self.corrupt)


def survey(store: Store, manifest: Manifest, served: bool = False) -> Report:
    """What is there and what is missing, by size alone: instant, also for 534 GB.

    `served`: a file that cannot be had from the directory to serve from is missing, too.
    """
    report, commit = Report(manifest), manifest.listing.commit
    for file in manifest.listing.files:
        here = file.digest is not None and store.tree.size(store.content(file)) == file.size
        if not here or (served and not store.served(commit, file)):
            report.missing.append(file)
        elif file.path not in manifest.verified:
            report.unverified.append(file)
    return report


def verify(store: Store, manifest: Manifest, advance: Callable[[int], None], jobs: int) -> Report:
    """Hash every file; a wrong one is set aside as `<name>.corrupt`, so that nothing loads or trusts it.

    Updates `manifest.verified`; the caller saves it.
    """
    report = survey(store, manifest, served=True)
    there = [file for file in manifest.listing.files if file not in report.missing]
    right, report.corrupt = hashed(store, there, advance, jobs)
    for file in report.corrupt:
        # The bytes stay for a look and go when the file has been fetched anew.
        path = store.final(file)
        if store.tree.size(store.content(file)) is not None:
            store.tree.replace(path, path.with_name(path.name + QUARANTINE))
    manifest.verified = {file.path for file in right}
    report.unverified.clear()
    return report


def hashed(
    store: Store, files: list[RemoteFile], advance: Callable[[int], None], jobs: int
) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Read files that are here and divide them by their digests: the right ones, the wrong ones."""

    def is_right(file: RemoteFile) -> bool:
        with store.tree.reading(store.content(file)) as stream:
            return file.hash_of(stream, advance) == file.digest

    right: list[RemoteFile] = []
    wrong: list[RemoteFile] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for file, good in zip(files, pool.map(is_right, files), strict=True):
            (right if good else wrong).append(file)
    return right, wrong
