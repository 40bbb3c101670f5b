"""Whether the schedulers of an engine go round their loops, by the signs that `sglang_plugin.pulse_hook` leaves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PREFIX = "pulse-"


def file_of(folder: Path, pid: int) -> Path:
    """Where the scheduler with this process id leaves its signs."""
    return folder / f"{_PREFIX}{pid}"


class Pulse:
    """The signs of the schedulers of one engine. folder: what the engine was given.

    Times are the caller's (time.monotonic()): a wall clock that is set does not look like a silence.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, float]] = {}  # by file: its modification time, and when that was new

    def silence(self, now: float) -> float:
        """Seconds since the scheduler that is silent longest left a sign; 0 where none ever did (vLLM, an old SGLang).

        It is as exact as this is called often.
        """
        with suppress(OSError):
            for path in self._folder.glob(f"{_PREFIX}*"):
                at = path.stat().st_mtime_ns
                if self._seen.get(path.name, (0, 0.0))[0] != at:
                    self._seen[path.name] = (at, now)
        return max((now - since for _, since in self._seen.values()), default=0.0)
