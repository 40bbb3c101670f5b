"""A connection to the engine: HTTP/1.1, read by httptools. A general client took a third of the CPU of a chunk."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

from .errors import Refusal

_MOST_UNREAD = 256  # pieces of an answer; the engine waits while a client reads no more


class EngineGone(Refusal):
    """The engine does not answer, or ended while it did."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is not available: {why}", status=503)


class EngineConnection(asyncio.Protocol):
    """Sends one request after the other, each when the answer before has `ended`.

    status: of the answer. ending: its last event was read, and only the end of its body is missing.
    """

    transport: Any
    status = 0
    ended = True
    ending = False
    lost = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._wake()

    def send(self, request: bytes) -> None:
        """Send a request."""
        self._parser, self.ended, self.ending = httptools.HttpResponseParser(self), False, False
        self._pieces.clear()  # what came behind the last event of a stream
        self.transport.write(request)

    async def read(self) -> bytes:
        """Return what has come of the answer's body, and nothing at its end."""
        while not self._pieces and not self.ended:
            if self.lost:
                raise EngineGone("it closed the connection")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._pieces) > _MOST_UNREAD:
            self.transport.resume_reading()
        read = b"".join(self._pieces)
        self._pieces.clear()
        return read

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError):  # or before the first request
            self.transport.abort()
        if len(self._pieces) > _MOST_UNREAD:
            self.transport.pause_reading()
        if self._pieces or self.ended:
            self._wake()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.ended = True
        if not self._parser.should_keep_alive():
            self.transport.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
