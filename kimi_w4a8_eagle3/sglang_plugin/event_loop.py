"""Watch the event loop of the engine's HTTP server: everything waits while one request keeps it busy.

The loop leaves signs of life for the supervisor, as the schedulers do, and the metric kimi_event_loop_lag_seconds has
how late it woke up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ..door.answers import App, Receive, Scope, Send
from ..engine.pulse import LOOP
from .pulse_hook import Sign

if TYPE_CHECKING:
    from prometheus_client import Histogram

logger = logging.getLogger(__name__)
_EVERY_S = 0.25
_BUCKETS = (0.01, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class EventLoopWatch:
    """ASGI middleware that watches the event loop from the application's start to its end."""

    def __init__(self, app: App) -> None:
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
        sign, lag = Sign(LOOP), _lag()
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            lag.observe(max(0.0, time.monotonic() - due))
            sign.leave()
    except OSError:  # a full disk must not end an engine
        logger.exception("the event loop is not watched any more")


def _lag() -> Histogram:
    from prometheus_client import Histogram  # it reads its environment when imported, and SGLang sets that late

    text = "Seconds that the event loop of the HTTP server woke up too late."
    return Histogram("kimi_event_loop_lag_seconds", text, buckets=_BUCKETS)
