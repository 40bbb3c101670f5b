"""Signs of life that the supervisor reads, so that it sees within seconds when a scheduler or the HTTP server hangs.

A sign is the modification time of a file in the folder that the supervisor gave to the engine, so no request to the
hanging process is needed. It is of time.monotonic(), so that the signs of several processes can be compared. A
scheduler loops at least once a second when idle, and once per forward pass. The event loop of the HTTP server waits
while one request keeps it busy; kimi_event_loop_lag_seconds shows how late it woke up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import cache
from typing import TYPE_CHECKING

from ...engine.given_folder import LOOP, SCHEDULER, file_of, given_folder
from ..hooks import Feature

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)
FEATURE = Feature("the schedulers' signs of life", remove_when="SGLang's health check sees a hanging scheduler")
_EVERY_S = 0.5
_LOOP_EVERY_S = 0.25
_LAG_BUCKETS = (0.01, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class Heartbeat:
    """Heartbeat file of this process. Without a supervisor it does nothing. kind: as in `file_of`."""

    def __init__(self, kind: str) -> None:
        folder = given_folder()
        self._file = -1
        if folder is not None:
            self._file = os.open(file_of(folder, os.getpid(), kind), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._next = 0.0

    def touch(self, every_s: float = _EVERY_S) -> None:
        """Touch the file, at most once in every_s seconds."""
        if self._file >= 0 and (now := time.monotonic()) >= self._next:
            os.utime(self._file, (now, now))
            self._next = now + every_s


@FEATURE.before("sglang.srt.managers.scheduler.Scheduler.process_input_requests")
def beat(*_: object) -> None:
    """Touch the file in each round of the loop, with or without requests. Never raise."""
    leave(SCHEDULER, _EVERY_S)


def leave(kind: str, every_s: float = 0.0) -> None:
    """Leave a sign of this process, at most once in every_s seconds. Never raise."""
    try:  # noqa: SIM105  # `suppress` costs 3 us in each step
        _heartbeat(kind).touch(every_s)
    except OSError:  # a full disk must not end an engine
        pass


@cache
def _heartbeat(kind: str) -> Heartbeat:
    return Heartbeat(kind)


class EventLoopWatch:
    """ASGI middleware that watches the event loop from the application's start to its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        watching = asyncio.create_task(_watch())
        try:
            await self._app(scope, receive, send)
        finally:
            watching.cancel()


async def _watch() -> None:
    try:
        heartbeat, lag = Heartbeat(LOOP), _lag()
        while True:
            due = time.monotonic() + _LOOP_EVERY_S
            await asyncio.sleep(_LOOP_EVERY_S)
            lag.observe(max(0.0, time.monotonic() - due))
            heartbeat.touch()
    except OSError:  # a full disk must not end an engine
        logger.exception("the event loop is not watched any more")


def _lag() -> Histogram:
    from prometheus_client import Histogram  # it reads its environment when imported, and SGLang sets that late

    text = "Seconds by which the event loop of the HTTP server woke up late."
    return Histogram("kimi_event_loop_lag_seconds", text, buckets=_LAG_BUCKETS)
