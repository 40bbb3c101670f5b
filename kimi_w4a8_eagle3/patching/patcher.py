"""Apply, verify and revert the patches of the manifest on one root: all files of a patch, or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..base.errors import KimiError
from . import ledger
from .edit_state import State
from .locate import find_root, find_version, first_file
from .patches import TRIED, Patch, PatchedFile


class Status(str, Enum):
    """The state of a whole patch."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    NOT_NEEDED = "not needed"  # upstream has the change
    TOO_OLD = "not applicable"  # the tree predates what the patch edits
    NOT_INSTALLED = "not installed"
    STALE_BUILD = "stale build"  # applied, but a module that was compiled before is still there
    MODIFIED = "modified"  # changed after it was patched
    UNKNOWN = "not recognised"


SATISFIED = {Status.APPLIED, Status.NOT_NEEDED, Status.TOO_OLD}


@dataclass(frozen=True)
class FileReport:
    """One file of a patch; `path` is None when none of the candidates exists."""

    path: Path | None
    state: State | None
    detail: str
    modified: bool = False


@dataclass(frozen=True)
class PatchReport:
    """State of one patch, which `kimi-w4a8 patch status` prints."""

    id: str
    title: str
    status: Status
    detail: str
    root: Path | None
    version: str | None
    files: tuple[FileReport, ...]


def inspect(patch: Patch, root: Path | None = None) -> PatchReport:
    """Read the patch's files below `root` (default: the package's installation) and report; change nothing."""
    base = root or find_root(patch.package)
    version = find_version(patch.distributions, root)
    files = tuple(_inspect_file(spec, base) for spec in patch.file) if base else ()
    status, detail = _summary(patch, base, version, files)
    return PatchReport(patch.id, patch.title, status, detail, base, version, files)


def apply(patch: Patch, root: Path | None = None) -> PatchReport:
    """Apply the patch if it is needed; a file that is not recognised or was modified is a KimiError for all of them."""
    before = inspect(patch, root)
    if before.status in (Status.UNKNOWN, Status.MODIFIED):
        raise refusal(before)
    if before.status is not Status.NOT_APPLIED or before.root is None:
        return before
    with _locked(before.root):
        plan = []
        for spec, report in zip(patch.file, before.files, strict=True):
            if report.path is not None and report.state is State.ORIGINAL:
                original = report.path.read_bytes()
                plan.append((report.path, original, _edited(patch, spec, report.path, original)))
        _write(patch, plan)
    return inspect(patch, root)


def revert(patch: Patch, root: Path | None = None) -> list[Path]:
    """Restore the files that have a backup, and return them; one that was changed later is a KimiError for all."""
    base = root or find_root(patch.package)
    if base is None:
        return []
    with _locked(base):
        found = ((first_file(base, spec.any_of), spec.make_edit()) for spec in patch.file)
        patched = [(path, edit) for path, edit in found if path and ledger.is_patched(path)]
        for path, edit in patched:
            if problem := ledger.objection(path, edit):
                raise problem
        for path, _ in patched:
            ledger.restore(path)
    return [path for path, _ in patched]


def remove_stale(patch: Patch, root: Path | None = None) -> list[Path]:
    """Delete the modules that were compiled before the patch, so that they are built again; return them."""
    report = inspect(patch, root)
    if report.status is not Status.STALE_BUILD or report.root is None:
        return []
    stale = _stale_builds(patch, report.root, report.files)
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return stale


def _inspect_file(spec: PatchedFile, root: Path) -> FileReport:
    path = first_file(root, spec.any_of)
    if path is None:
        return FileReport(None, None, f"no {spec.any_of[0]} below {root}")
    edit = spec.make_edit()
    if problem := ledger.objection(path, edit):
        return FileReport(path, None, problem.what, modified=True)
    return FileReport(path, *edit.inspect(path.read_bytes()))


def _summary(patch: Patch, root: Path | None, version: str | None, files: tuple[FileReport, ...]) -> tuple[Status, str]:
    if root is None or all(file.path is None for file in files):
        return Status.NOT_INSTALLED, files[0].detail if files else f"no package {patch.package}"
    states = {file.state for file in files}
    details = "; ".join(dict.fromkeys(file.detail for file in files))
    if any(file.modified for file in files):
        return Status.MODIFIED, details
    if states == {State.PREDATES}:
        return Status.TOO_OLD, details
    if State.UPSTREAM in states and states <= {State.UPSTREAM, State.ORIGINAL}:
        return Status.NOT_NEEDED, details  # a release with its own fix, possibly in fewer places
    if states == {State.APPLIED}:
        if stale := _stale_builds(patch, root, files):
            return Status.STALE_BUILD, f"compiled before the patch: {', '.join(map(str, stale))}"
        return Status.APPLIED, details
    if states <= {State.ORIGINAL, State.APPLIED}:
        return Status.NOT_APPLIED, details
    return Status.UNKNOWN, details


def _stale_builds(patch: Patch, root: Path, files: tuple[FileReport, ...]) -> list[Path]:
    """Return compiled modules older than a source that we patched; sources patched by others count as built."""
    times = [file.path.stat().st_mtime for file in files if file.path and ledger.is_patched(file.path)]
    built = [path for pattern in patch.built for path in root.glob(pattern)]
    return sorted(path for path in built if times and path.stat().st_mtime < max(times))


def _edited(patch: Patch, spec: PatchedFile, path: Path, original: bytes) -> bytes:
    edit = spec.make_edit()
    edited = edit.apply(original)
    state, detail = edit.inspect(edited)
    if state is not State.APPLIED:
        raise KimiError(f"the edit of patch {patch.id} had no effect", where=f"{path}: {detail}")
    return edited


def _write(patch: Patch, plan: list[tuple[Path, bytes, bytes]]) -> None:
    done: list[Path] = []
    try:
        for path, original, edited in plan:
            done.append(path)
            ledger.replace(path, original, edited)
    except OSError as error:
        for path in filter(ledger.is_patched, done):
            ledger.restore(path)
        raise KimiError(
            f"patch {patch.id} could not be written; nothing is changed",
            where=str(error),
            remedy="run as the owner of the installation, for example in the image build",
        ) from error


def refusal(report: PatchReport) -> KimiError:
    """Return the error for a patch that must not be written."""
    bad = [file for file in report.files if file.modified or file.state in (None, State.UNKNOWN)]
    where = "; ".join(f"{file.path or report.root}: {file.detail}" for file in bad)
    return KimiError(
        f"patch {report.id} is refused: {report.status.value}",
        where=where or report.detail,
        expected="files of the structure that the patch was written for",
        remedy=f"nothing was written; tried on {TRIED}: install one of these releases, or serve without the patch",
    )


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Allow one `kimi-w4a8 patch` at a time on a root."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
