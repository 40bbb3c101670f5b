"""A connection has a deadline for the header of each request: the first counts from its start, others from a byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kimi_w4a8_eagle3.door.connections import bound_headers


class Timer:
    def __init__(self, after_s: float, call: Any, protocol: Any) -> None:
        self.after_s, self._call, self._protocol, self._cancelled = after_s, call, protocol, False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def expire(self) -> None:
        self._call(self._protocol)


class Transport:
    closed = False

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def close(self) -> None:
        self.closed = True


def connected() -> tuple[Any, Transport, list[Timer]]:
    """A connection of a protocol like uvicorn's, where b"." ends a header, and its timers."""
    timers: list[Timer] = []

    class Protocol:
        cycle: Any = None

        def __init__(self) -> None:
            def call_later(after_s: float, call: Any, protocol: Any) -> Timer:
                timers.append(Timer(after_s, call, protocol))
                return timers[-1]

            self.loop = SimpleNamespace(call_later=call_later)

        def connection_made(self, transport: Transport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"."):
                self.cycle = SimpleNamespace(response_complete=False)

    bound_headers(Protocol, deadline_s=7)
    protocol = Protocol()
    transport = Transport(protocol)
    protocol.connection_made(transport)
    return protocol, transport, timers


@pytest.mark.parametrize("replaced", [False, True])
def test_a_connection_without_a_header_is_closed_unless_it_became_a_websocket(replaced: bool) -> None:
    protocol, transport, timers = connected()
    protocol.data_received(b"GET")
    transport.protocol = None if replaced else protocol
    assert [timer.after_s for timer in timers] == [7] and not timers[0].cancelled()
    timers[0].expire()
    assert transport.closed is not replaced


def test_each_header_has_its_own_deadline_and_a_body_has_none() -> None:
    protocol, transport, timers = connected()
    protocol.data_received(b"header.")
    assert timers[0].cancelled()
    protocol.data_received(b"body")  # the request runs
    assert len(timers) == 1
    protocol.cycle.response_complete = True
    protocol.data_received(b"half a header")
    protocol.data_received(b", more of it")
    assert [timer.cancelled() for timer in timers] == [True, False] and timers[1].after_s == 7
    timers[1].expire()
    assert transport.closed
