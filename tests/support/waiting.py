"""Waiting for a condition, or for the end of processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], seconds: float = 280.0, why: Callable[[], object] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not come true {why()}"
        time.sleep(0.05)


def gone(*processes: psutil.Process) -> bool:
    alive = psutil.wait_procs(processes, timeout=120)[1]
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
