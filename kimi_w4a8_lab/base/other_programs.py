"""Share of this machine's cores that other programs use while a measurement runs."""

from __future__ import annotations

from collections.abc import Callable

import psutil

_MUCH = 0.15


def watched() -> Callable[[], float]:
    """Begin to count, and return a function that gives the share since then, of 1.

    Programs that this process or one of its children started, and that still run, are not others.
    """
    other, everything = _seconds()

    def share() -> float:
        now, all_now = _seconds()
        return max(0.0, (now - other) / max(all_now - everything, 1e-9))

    return share


def busy(others: float) -> str:
    """Return a warning if other programs used many of the cores while times were taken; empty otherwise."""
    used = f"Other programs used {others:.0%} of this machine's cores meanwhile"
    return "" if others < _MUCH else f"{used}: measure again before you use the times."


def _seconds() -> tuple[float, float]:
    """Return the seconds that other programs used of all cores, and the seconds that there were."""
    here, cores = psutil.Process(), psutil.cpu_times()
    used = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    own = sum(times.user + times.system + times.children_user + times.children_system for times in used)
    return sum(cores) - cores.idle - cores.iowait - own, sum(cores)
