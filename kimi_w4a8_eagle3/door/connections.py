"""Close connections whose request headers do not arrive in time: uvicorn waits for them without end."""

from __future__ import annotations

from typing import Any

HEADERS_S = 10.0


def bound_headers(protocol: Any, deadline_s: float = HEADERS_S) -> None:
    """Make a protocol class of uvicorn close a connection that has not sent the whole header of a request.

    The time counts from the connection for the first request, and from the first byte for each later one.
    """
    connected, received = protocol.connection_made, protocol.data_received

    def connection_made(self: Any, transport: Any) -> None:
        connected(self, transport)
        self.kimi_deadline = self.loop.call_later(deadline_s, close, self)

    def data_received(self: Any, data: bytes) -> None:
        before = self.cycle
        received(self, data)
        if self.cycle is not before:  # uvicorn makes a cycle when a header is complete
            self.kimi_deadline.cancel()
        elif (before is None or before.response_complete) and self.kimi_deadline.cancelled():
            self.kimi_deadline = self.loop.call_later(deadline_s, close, self)

    def close(self: Any) -> None:
        if self.transport.get_protocol() is self:  # not a websocket's by now
            self.transport.close()

    protocol.connection_made, protocol.data_received = connection_made, data_received
