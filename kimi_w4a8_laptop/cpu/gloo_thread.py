"""One thread for all gloo groups of a rank. SGLang makes nine groups, whose threads each wake 100 times a second.

The wake-ups are all that an idle engine on a CPU computes: 1.5 % of a core per replica.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d


class _OneThread(ProcessGroupGloo):
    """torch's gloo group on a device, which is a thread, that all groups of this process share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs of torch lack it
        options._devices = [_device()]
        options._threads = 2  # torch's number for one device
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@cache
def _device() -> Any:
    return ProcessGroupGloo.create_default_device()


def install() -> None:
    """Make torch create gloo groups with the shared thread."""
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]  # torch also compares a group's type with it
