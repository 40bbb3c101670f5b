"""One thread for all gloo groups of a rank: SGLang makes nine, and the thread of each wakes a hundred times a second.

That is all that an idle engine on a CPU computes: 1.5 % of a core, which a fleet pays for each replica.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d


class _OneThread(ProcessGroupGloo):
    """torch's own, on the device, which is a thread, that all groups of this process share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs of torch lack it
        options._devices = [_device()]
        options._threads = 2  # as torch has it for one device
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@cache
def _device() -> Any:
    return ProcessGroupGloo.create_default_device()


def install() -> None:
    """Let torch make its gloo groups so."""
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]  # it asks for its type, too
