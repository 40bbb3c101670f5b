"""Repositories in the Hugging Face cache: huggingface_hub brings the files and compares every digest with the Hub's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, disable_progress_bars, validate_repo_id
from rich.filesize import decimal

from ..base.errors import KimiError, UsageError
from ..base.files import shortage
from ..recipe.schema import Recipe
from .hub import explain, quiet_hub

if TYPE_CHECKING:
    from huggingface_hub.utils._verification import FolderVerification

LOOK_S, REPORT_S = 1.0, 60.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit in the cache. `sizes` are those of its listing, by path; None without a listing."""

    folder: Path
    sizes: Mapping[str, int] | None

    @property
    def present(self) -> dict[str, int]:
        """Sizes of the files that are here, by path."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}

    @property
    def missing(self) -> dict[str, int]:
        """Sizes of the listed files that are not here, or here with another size, by path."""
        present = self.present
        return {path: size for path, size in (self.sizes or {}).items() if present.get(path) != size}

    @property
    def mark(self) -> Path:
        """File that is newer than all files whose digests were compared."""
        return self.folder.parents[1] / "kimi-verified" / self.folder.name

    @property
    def verified(self) -> bool:
        paths = [self.folder / path for path in self.present]
        return self.mark.exists() and all(path.stat().st_mtime_ns <= self.mark.stat().st_mtime_ns for path in paths)

    def remove(self, path: str) -> None:
        """Delete a file, and its content where that lies in the cache, so that a fetch brings it again."""
        link, content = self.folder / path, (self.folder / path).resolve()
        blob = link.parent / link.readlink() if link.is_symlink() else link
        for place in {link, blob, content}:
            if place.parent.resolve().is_relative_to(self.folder.parents[2].resolve()):
                place.unlink(missing_ok=True)


@dataclass(frozen=True)
class Repository:
    """A model repository at one revision, and the cache that it goes to."""

    repo: str
    revision: str
    cache: Path

    @classmethod
    def named(cls, repo: str, revision: str, cache: Path) -> Repository:
        """Parse what a person typed, or a recipe says."""
        try:
            validate_repo_id(repo)
            if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", revision):
                raise ValueError(f"{revision!r} is not a revision")
        except ValueError as error:
            what, expected = " ".join(str(error).split()), "owner/name, and a branch, tag or commit"
            raise UsageError(what, expected=expected, remedy="correct it") from None
        return cls(repo, revision, cache)

    def __str__(self) -> str:
        return f"{self.repo} at {self.revision}"

    @property
    def folder(self) -> Path:
        return self.cache / repo_folder_name(repo_id=self.repo, repo_type="model")

    def here(self) -> Snapshot | None:
        """Return the snapshot that an earlier download left, whole or not, without a request to the Hub."""
        place: dict[str, Any] = {"cache_dir": self.cache, "revision": self.revision}
        try:
            folder = Path(snapshot_download(self.repo, local_files_only=True, allow_patterns=[], **place))
            files = get_cached_repo_tree(self.repo, revision=folder.name, cache_dir=self.cache)
        except CachedRepoTreeNotFoundError:
            return Snapshot(folder, None)
        except (OSError, ValueError):
            return None
        return Snapshot(folder, {file.path: file.size for file in files})

    def needed(self) -> int:
        """Return the bytes that have to come, by the Hub's listing; raise KimiError if they do not fit on the disk."""
        quiet_hub()
        disable_progress_bars()
        try:
            place: dict[str, Any] = {"cache_dir": self.cache, "endpoint": constants.ENDPOINT}
            files = snapshot_download(self.repo, revision=self.revision, dry_run=True, **place)
        except Exception as error:
            raise explain(error, str(self)) from None
        needed = sum(file.file_size or 0 for file in files if file.will_download)
        if short := shortage(self.cache, needed, "choose another place with HF_HOME"):
            raise short
        return needed

    def verify(self, snapshot: Snapshot, say: Say) -> FolderVerification:
        """Compare the files that are here with the Hub's digests. Damaged files are deleted."""
        say(f"hashing {decimal(sum(snapshot.present.values()))} of {self.repo}")
        try:
            found = quiet_hub().verify_repo_checksums(self.repo, revision=snapshot.folder.name, cache_dir=self.cache)
        except Exception as error:
            raise explain(error, str(self)) from None
        for mismatch in found.mismatches:
            snapshot.remove(mismatch["path"])
        if not found.mismatches:
            snapshot.mark.parent.mkdir(exist_ok=True)
            snapshot.mark.touch()
        return found

    def fetch(self, say: Say, jobs: int = 8, silence_s: float = 300.0) -> Snapshot:
        """Bring all files, with every digest compared. A KimiError leaves the complete files in place."""
        problem = ""
        for attempt in range(3):
            if problem:
                say(f"{self}: {problem}; trying again by plain HTTP, without Xet")
            xet = attempt == 0 and not constants.HF_HUB_DISABLE_XET
            problem = self._transfer(say, self.needed(), jobs, silence_s, xet)
            snapshot = self.here()
            if snapshot and not problem and not snapshot.verified:
                bad = ", ".join(mismatch["path"] for mismatch in self.verify(snapshot, say).mismatches)
                problem = f"these files arrived damaged and were deleted: {bad}" if bad else ""
            if snapshot and not problem:
                return snapshot
        remedy = "repeat the command, which keeps complete files; check network and proxy, the disk and RAM"
        raise KimiError(f"{self} could not be fetched: {problem}", constants.ENDPOINT, remedy=remedy)

    def _transfer(self, say: Say, needed: int, jobs: int, silence_s: float, xet: bool) -> str:
        """Run `child`; return the reason if it failed. hf_xet can wait for ever for a storage (xet-core issue 883)."""
        for partial in self.folder.glob("blobs/*.incomplete"):  # of a killed download; a live one holds its file's lock
            lock = self.cache / ".locks" / self.folder.name / f"{partial.name.split('.')[0]}.lock"
            with suppress(TimeoutError, OSError), WeakFileLock(lock, timeout=0.1):
                partial.unlink()
        arguments = (self.repo, self.revision, str(self.cache), str(jobs))
        environment = {**os.environ, "HF_HUB_DISABLE_XET": "0" if xet else "1"}
        child = subprocess.Popen([sys.executable, "-m", f"{__package__}.child", *arguments], env=environment)
        before = state = self._written()
        written_at = reported_at = time.monotonic()
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_S)
                now, last, state = time.monotonic(), state, self._written()
                written_at = now if state != last else written_at
                if now - written_at > silence_s:
                    return f"no byte arrived for {silence_s / 60:g} minutes"
                if now - reported_at > REPORT_S and not sys.stderr.isatty():  # else huggingface_hub shows bars
                    say(f"{self.repo}: {decimal(state[0] - before[0])} of {decimal(needed)}")
                    reported_at = now
        finally:
            child.kill()
            child.wait()
        return "" if child.returncode == 0 else "the transfer failed, as said above"

    def _written(self) -> tuple[int, int]:
        """Return the size of the content in the cache, and its last change. Xet's is of all repositories together."""
        found = [(0, 0)]
        for path in (*self.folder.glob("blobs/**/*"), *self.cache.glob("blobs/**/*")):
            with suppress(OSError):  # renamed meanwhile
                found.append(((status := path.lstat()).st_size, status.st_mtime_ns))
        return sum(size for size, _ in found), max(change for _, change in found)


def hub_repositories(recipe: Recipe) -> list[Repository]:
    """Return the Hub repositories of a recipe, target first; none when its models are built in or local."""
    cache = Path(constants.HF_HUB_CACHE)
    return [Repository.named(one.repo, one.revision, cache) for one in recipe.checkpoints if one.on_hub]
