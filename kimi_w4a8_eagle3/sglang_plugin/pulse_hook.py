"""Each scheduler leaves a sign whenever it goes round its loop: a supervisor sees within seconds when it does not.

The sign is the modification time of a file in the folder that the supervisor gave to the engine: it needs no answer of
the process that it speaks for. A scheduler goes round at least once a second while it idles, and once a forward pass.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ..engine.leftovers import given_folder
from ..engine.pulse import file_of

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
_EVERY_S = 0.5


class _Sign:
    """The file of this process; none where nobody supervises it."""

    def __init__(self) -> None:
        folder = given_folder()
        self._file = -1
        if folder is not None:
            self._file = os.open(file_of(folder, os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._next = 0.0

    def leave(self) -> None:
        now = time.monotonic()
        if self._file >= 0 and now >= self._next:
            os.utime(self._file)
            self._next = now + _EVERY_S


_signs: list[_Sign] = []


def beat(*_: Any) -> None:
    """BEFORE hook of `TARGET`, which runs once in every round, with requests or without. Never raises."""
    try:
        if not _signs:
            _signs.append(_Sign())
        _signs[0].leave()
    except OSError:  # a full disk must not end an engine
        return
