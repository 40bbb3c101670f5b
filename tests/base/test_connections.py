"""Connections of a server: a client sends whole headers in time and stops after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from kimi_w4a8_eagle3.base.connections import BoundedProtocol

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
KEPT = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
ONE_BYTE = b"1\r\nx\r\n"


class Websocket(asyncio.Protocol):  # uvicorn hands the connection over
    def __init__(self, **_: Any) -> None:
        pass

    def connection_made(self, transport: Any) -> None:
        asyncio.get_running_loop().call_later(1.5, transport.write, b"ok")


async def slow(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1.5)  # a long answer is no late header
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def with_server(app: Any, scenario: Callable[[int], Awaitable[Any]], seconds: float = 1.0) -> Any:
    """Return what `scenario` finds at the port of `app`, served by uvicorn as SGLang serves."""

    class Bounded(BoundedProtocol):
        deadline_s = seconds

    async def run() -> Any:
        config = uvicorn.Config(
            app, port=0, http=Bounded, ws=Websocket, timeout_keep_alive=60, lifespan="off", log_level="error"
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        found = await asyncio.wait_for(scenario(server.servers[0].sockets[0].getsockname()[1]), 280)
        server.should_exit = True
        await serving
        return found

    return asyncio.run(run())


async def answer(port: int, first: bytes, second: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    if second:
        await reader.readuntil(b"ok")
        writer.write(second)
    reading = asyncio.create_task(reader.readuntil(b"ok") if b"Upgrade" in first else reader.read())
    while second and not (await asyncio.wait({reading}, timeout=0.3))[0]:
        writer.write(b"x")  # a piece of the header does not renew its deadline
    found = await reading
    writer.close()
    return found


def test_connections_without_a_whole_header_are_closed() -> None:
    sent = [(b"",), (WHOLE[:20],), (WHOLE,), (KEPT, WHOLE[:20]), (UPGRADE,)]

    async def scenario(port: int) -> list[bytes]:
        return await asyncio.gather(*(answer(port, *pieces) for pieces in sent))

    silent, cut, whole, second, websocket = with_server(slow, scenario)
    assert (silent, cut, second) == (b"", b"", b"")
    assert whole.endswith(b"ok") and websocket.endswith(b"ok")


async def endless(port: int, start: bytes, piece: bytes) -> bytes:
    """Send pieces until the server closes the connection; return its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    answered = b""
    try:
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            try:
                if not (read := await asyncio.wait_for(reader.read(4096), 0.01)):
                    return answered
                answered += read
            except asyncio.TimeoutError:
                continue
    except ConnectionError:
        return answered
    finally:
        writer.close()
    raise AssertionError("still connected")


ENDLESS = {
    "body after a refusal": (CHUNKED + b"\r\n", ONE_BYTE * 100, b" 401 "),
    "header": (CHUNKED + b"X: ", b"x" * 100_000, b""),
    "trailer": (CHUNKED + b"\r\n0\r\nX: ", b"x" * 100_000, b""),
}


async def refusing(scope: Any, receive: Any, send: Any) -> None:
    """Refuse a body that has begun, unread."""
    if (await receive()).get("body"):
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize(("start", "piece", "expected"), ENDLESS.values(), ids=ENDLESS)
def test_a_client_that_goes_on_sending_is_disconnected(start: bytes, piece: bytes, expected: bytes) -> None:
    seconds = 1.0 if expected else 3600.0  # the size of a header is bounded, too
    answered = with_server(refusing, lambda port: endless(port, start, piece), seconds)
    assert answered.startswith(b"HTTP/1.1" + expected) if expected else answered == b""
