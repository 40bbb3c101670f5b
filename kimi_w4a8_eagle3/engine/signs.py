"""Direct check of the processes that an engine needs: that they exist, and that their loops still turn.

When one of them is killed, for example by the kernel's OOM killer, SGLang notices after about seven seconds. Until then
its front end accepts requests that are never answered.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from .given_folder import RECEIVED, SCHEDULER, SENT

_NAMED = "sglang::"  # SGLang's names of schedulers and detokenizers; helpers such as compilers come and go


def is_alive(process: psutil.Process) -> bool:
    """Return False for a process that has ended, including a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class EngineProcesses:
    """The schedulers and detokenizers of a ready engine with the main process `pid`."""

    def __init__(self, pid: int) -> None:
        self._names: dict[psutil.Process, str] = {}
        with suppress(psutil.NoSuchProcess):  # the engine just ended; its exit code will show it
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # a helper just ended
                    name = " ".join(process.cmdline()).strip()
                    if name.startswith(_NAMED):
                        self._names[process] = name

    def lost(self) -> str | None:
        """Return the name of a process that is gone, or None while all are there."""
        return next((name for process, name in self._names.items() if not is_alive(process)), None)

    def stopped(self) -> str | None:
        """Return the name of a process that a signal or a debugger stopped: an idle detokenizer has no other sign."""
        for process, name in self._names.items():
            with suppress(psutil.NoSuchProcess):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    return name
        return None


class DetokenizerQueue:
    """Output that schedulers sent to the detokenizer, and that did not come back to the HTTP server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._received, self._since = -1, 0.0

    def age(self, now: float) -> float:
        """Return for how many seconds nothing came back although something was sent; 0 without these signs.

        now: time.monotonic(). A detokenizer loads no plugin, so both of its neighbours leave signs.
        """
        sent, received = self._last(SENT), self._last(RECEIVED)
        if sent <= received or received != self._received or not received:
            self._received, self._since = received, now
        return now - self._since

    def _last(self, kind: str) -> int:
        with suppress(OSError):
            return max((path.stat().st_mtime_ns for path in self._folder.glob(f"{kind}-*")), default=0)
        return 0


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
