"""Detect schedulers that have stopped looping, by the files that `sglang_plugin.pulse_hook` touches."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PREFIX = "pulse-"


def file_of(folder: Path, pid: int) -> Path:
    """Return the file that the scheduler with this process id touches."""
    return folder / f"{_PREFIX}{pid}"


class Pulse:
    """Signs of life of one engine's schedulers. folder: the engine's temporary folder.

    The caller passes time.monotonic(), so a changed wall clock does not look like silence.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, float]] = {}  # by file: modification time, and when it was first seen

    def silence(self, now: float) -> float:
        """Return the longest silence of a scheduler in seconds; 0 if no scheduler leaves signs (vLLM, an old SGLang).

        The precision is the interval between two calls.
        """
        with suppress(OSError):
            for path in self._folder.glob(f"{_PREFIX}*"):
                at = path.stat().st_mtime_ns
                if self._seen.get(path.name, (0, 0.0))[0] != at:
                    self._seen[path.name] = (at, now)
        return max((now - since for _, since in self._seen.values()), default=0.0)
