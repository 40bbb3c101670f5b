"""Touch a file in every round of a scheduler's loop, so that the supervisor sees within seconds when a scheduler hangs.

The file lies in the folder that the supervisor gave to the engine, and its modification time is the sign of life. No
request to the hanging process is needed. A scheduler loops at least once a second when idle, and once per forward pass.
"""

from __future__ import annotations

import os
import time

from ..engine.leftovers import given_folder
from ..engine.pulse import SCHEDULER, file_of
from .hooks import Feature

FEATURE = Feature("the schedulers' signs of life", remove_when="SGLang's health check sees a hanging scheduler")
_EVERY_S = 0.5


class Sign:
    """File that this process touches, of one kind of `engine.pulse`; none without a supervisor."""

    def __init__(self, kind: str = SCHEDULER) -> None:
        folder = given_folder()
        self._file = -1
        if folder is not None:
            self._file = os.open(file_of(folder, os.getpid(), kind), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._next = 0.0

    def leave(self) -> None:
        now = time.monotonic()
        if self._file >= 0 and now >= self._next:
            os.utime(self._file)
            self._next = now + _EVERY_S


_signs: list[Sign] = []


@FEATURE.before("sglang.srt.managers.scheduler.Scheduler.process_input_requests")
def beat(*_: object) -> None:
    """Touch the file in each round of the loop, with or without requests. Never raise."""
    try:
        if not _signs:
            _signs.append(Sign())
        _signs[0].leave()
    except OSError:  # a full disk must not end an engine
        return
