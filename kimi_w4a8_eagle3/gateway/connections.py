"""Connections of clients: read by httptools, bounded in their headers, and open until a half-closed client is answered.

uvicorn bounds neither the time nor, with httptools, the size of a header. smg in front has time-outs of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS, MAX_HEADER_BYTES = 100, 16 * 1024
DEADLINE_S = 10.0  # for a whole header, and for the rest of a request that was answered before its end


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A header that is too long, or a request that never ends, closes it."""

    _timer: asyncio.TimerHandle
    _whole = False  # the last byte that arrived ended a request
    _unread = 0  # bytes since the last whole header or piece of a body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(DEADLINE_S, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._whole = False
        self._unread += len(data)
        super().data_received(data)
        # uvicorn makes a cycle when a header is complete
        if self.cycle is not None and (self._whole or not self.cycle.response_complete):
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(DEADLINE_S, self._close)
        if self._unread > MAX_HEADER_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._close()

    def eof_received(self) -> bool:  # type: ignore[override]  # the answer keeps the connection open
        """Keep a half-closed connection until its answer is written; the application reads an empty message."""
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if waits:
            self.cycle.keep_alive = False
            self.cycle.message_event.set()
        return waits

    def on_message_begin(self) -> None:
        self._whole = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._whole, self._unread = True, 0
        super().on_message_complete()

    def _close(self) -> None:
        self.transport.close()
