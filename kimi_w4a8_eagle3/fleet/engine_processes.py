"""The processes that an engine cannot do without, looked at directly.

Where one is killed (by the kernel's OOM killer, say), SGLang notices after about seven seconds; until then its
front end takes requests that nobody will answer.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

_NAMED = "sglang::"  # SGLang names its schedulers and detokenizers; helpers such as compilers come and go


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, also while nobody has asked for its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class EngineProcesses:
    """What an engine with the main process `pid` consists of once it is ready."""

    def __init__(self, pid: int) -> None:
        self._names: dict[psutil.Process, str] = {}
        with suppress(psutil.NoSuchProcess):  # the engine ended just now, which its exit code will tell
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # a helper ended just now
                    name = " ".join(process.cmdline()).strip()
                    if name.startswith(_NAMED):
                        self._names[process] = name

    def lost(self) -> str | None:
        """The name of one that is gone; None while all are there."""
        return next((name for process, name in self._names.items() if not is_alive(process)), None)
