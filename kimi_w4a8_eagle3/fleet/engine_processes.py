"""Direct check of the processes that an engine needs.

When one of them is killed, for example by the kernel's OOM killer, SGLang notices after about seven seconds. Until then
its front end accepts requests that are never answered.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

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
