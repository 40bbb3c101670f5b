"""Connections of clients: bounded in their headers, and open until a half-closed client is answered."""

from __future__ import annotations

from ..base.connections import BoundedProtocol
from . import metrics

MAX_HEADERS = 100


class ClientProtocol(BoundedProtocol):
    """One connection. A header that is too long, or a request that never ends, closes it."""

    max_header_bytes = 16 * 1024

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.headers or ()) > MAX_HEADERS:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        metrics.REQUESTS.labels("other", "400").inc()  # counted, never logged: a client can send thousands
        super().send_400_response(msg)

    def eof_received(self) -> bool:  # type: ignore[override]  # the answer keeps the connection open
        """Keep a half-closed connection until its answer is written; the application reads an empty message."""
        if self._held:
            self.loop.call_soon(self._ended)  # after it was read
            return True
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if waits:
            self.cycle.keep_alive = False
            self.cycle.message_event.set()
        return waits

    def _ended(self) -> None:
        if not self.eof_received():
            self.transport.close()
