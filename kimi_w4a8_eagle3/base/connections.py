"""Connections of a server: read by httptools, and closed when a client sends neither a request nor the end of one.

uvicorn reads with h11 where httptools is missing. h11 needs 0.56 s of the event loop for 600 kB in chunks of one byte,
httptools 0.009 s. uvicorn bounds neither the time nor, with httptools, the size of a header. It also parses the body of
a request that was refused at its header.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_READ = 2**14  # bytes to parse before looking whether a request has begun
_SMALL, _MOST_SMALL = 512, 1000  # bytes of a small piece, and such pieces of an answered request that are parsed


class BoundedProtocol(HttpToolsProtocol):
    """One connection of a client.

    deadline_s: time for a whole header, from the connection for the first request and from the first byte for each
    later one; also for the rest of a request that was answered before its end. max_header_bytes: of a header, and of
    what follows a body's last chunk. The application sees a header before its body is parsed.
    """

    deadline_s = 10.0
    max_header_bytes = 64 * 1024  # as h11 allows
    _timer: asyncio.TimerHandle
    _whole = False  # the last byte that arrived ended a request
    _unread = 0  # bytes since the last whole header or piece of a body
    _unwanted = 0  # small pieces of a body whose request was answered
    _held = b""  # arrived behind a header that the application has not seen yet

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.deadline_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._held:
            self._held += data
            return
        while data and self._unwanted <= _MOST_SMALL and not self.transport.is_closing():
            cycle, self._whole = self.cycle, False
            piece, data = data[:_READ], data[_READ:]
            self._unread += len(piece)
            super().data_received(piece)
            # uvicorn makes a cycle when a header is complete
            if self.cycle is not None and (self._whole or not self.cycle.response_complete):
                self._timer.cancel()
            elif self._timer.cancelled():
                self._timer = self.loop.call_later(self.deadline_s, self.transport.close)
            if self._unread > self.max_header_bytes:
                self.transport.close()
            if data and self.cycle is not cycle:
                self._held = data
                self.loop.call_soon(self._go_on)  # after the application's first step
                return

    def _go_on(self) -> None:
        data, self._held = self._held, b""
        self.data_received(data)

    def on_message_begin(self) -> None:
        self._whole = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unread = self._unwanted = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        if self.cycle is None or not self.cycle.response_complete:  # a call for each chunk costs most of the time
            super().on_body(body)
        elif len(body) < _SMALL:
            self._unwanted += 1

    def on_message_complete(self) -> None:
        self._whole, self._unread = True, 0
        super().on_message_complete()
