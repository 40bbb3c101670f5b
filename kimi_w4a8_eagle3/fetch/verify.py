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


def present(store: Store, file: RemoteFile) -> bool:
    """Whether the file is there with the right size."""
    path = store.final(file)
    return path.is_file() and path.stat().st_size == file.size


def survey(store: Store, manifest: Manifest) -> Report:
    """What is there and what is missing, by size alone: instant, also for 497 GB."""
    report = Report(manifest)
    for file in manifest.listing.files:
        if not present(store, file):
            report.missing.append(file)
        elif not store.trusts(file, manifest):
            report.unverified.append(file)
    return report


def verify(store: Store, manifest: Manifest, advance: Callable[[int], None], jobs: int) -> Report:
    """Hash every file; a wrong one is set aside as `<name>.corrupt`, so that nothing loads or trusts it.

    Updates `manifest.verified`; the caller saves it.
    """
    report = survey(store, manifest)
    there = [file for file in manifest.listing.files if file not in report.missing]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        digests = pool.map(lambda file: file.hash_of(store.final(file), advance), there)
        for file, digest in zip(there, digests, strict=True):
            if digest == file.digest:
                manifest.verified.add(file.path)
            else:
                set_aside(store, file)
                report.corrupt.append(file)
    manifest.verified -= {file.path for file in report.missing + report.corrupt}
    report.unverified.clear()
    return report


def set_aside(store: Store, file: RemoteFile) -> None:
    """Rename a wrong file; the bytes stay for a look and go when the file has been fetched anew."""
    path = store.final(file).resolve() if store.final(file).is_symlink() else store.final(file)
    if path.exists():
        path.replace(path.with_name(path.name + QUARANTINE))
