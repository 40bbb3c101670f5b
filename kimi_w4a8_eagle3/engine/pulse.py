"""Detect loops of an engine that have stopped, by the files that its schedulers and its HTTP server touch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .given_folder import SCHEDULER


class Pulse:
    """Signs of life of an engine's schedulers, or of its HTTP server. folder: the engine's temporary folder.

    The caller passes time.monotonic(), so a changed wall clock does not look like silence.
    """

    def __init__(self, folder: Path, kind: str = SCHEDULER) -> None:
        self._folder, self._kind = folder, kind
        self._seen: dict[str, tuple[int, float]] = {}  # by file: modification time, and when it was first seen

    def silence(self, now: float) -> float:
        """Return the longest silence of a loop in seconds; 0 if none leaves signs (an old SGLang).

        The precision is the interval between two calls.
        """
        with suppress(OSError):
            for path in self._folder.glob(f"{self._kind}-*"):
                at = path.stat().st_mtime_ns
                if self._seen.get(path.name, (0, 0.0))[0] != at:
                    self._seen[path.name] = (at, now)
        return max((now - since for _, since in self._seen.values()), default=0.0)
