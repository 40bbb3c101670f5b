"""Snapshots in the Hugging Face cache, where SGLang looks: files that are here, and files that are missing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit. `sizes` are those of the listing, by path; None if the cache has no listing."""

    folder: Path
    sizes: Mapping[str, int] | None

    @property
    def commit(self) -> str:
        return self.folder.name

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
    def verified(self) -> bool:
        """True if the digests of all files that are here were compared, and none changed since then."""
        try:
            compared = self._mark.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        return all((self.folder / path).stat().st_mtime_ns <= compared for path in self.present)

    def mark_verified(self) -> None:
        self._mark.parent.mkdir(exist_ok=True)
        self._mark.touch()

    def remove(self, path: str) -> None:
        """Delete a file and what its links lead to in the cache, so that nothing loads it and a fetch brings it."""
        cache, place = self.folder.parents[2].resolve(), self.folder / path
        while place.parent.resolve().is_relative_to(cache) and os.path.lexists(place):
            target = place.parent / place.readlink() if place.is_symlink() else place
            place.unlink()
            place = target

    @property
    def _mark(self) -> Path:
        return self.folder.parents[1] / "kimi-verified" / self.commit
