"""Connections of the engine's HTTP server: a client sends whole headers in time and stops after a refusal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from support.door_app import CLIENT_KEY, KEYS, Engine, guarded

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.door.connections import BoundedProtocol
from kimi_w4a8_eagle3.door.settings import DoorSettings
from kimi_w4a8_eagle3.sglang_plugin.http.door import _bound_connections

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
    "body after 401": (KEYS, CHUNKED + b"\r\n", ONE_BYTE * 100, b" 401 "),
    "body after 404": (DoorSettings(), CHUNKED.replace(b"/v1/chat/completions", b"/x") + b"\r\n", ONE_BYTE, b" 404 "),
    "body after 413": (DoorSettings(max_body_bytes=1000), CHUNKED + b"\r\n", ONE_BYTE * 100, b" 413 "),
    "header": (KEYS, CHUNKED + b"X: ", b"x" * 100_000, b""),
    "trailer": (
        KEYS,
        CHUNKED + b"Authorization: Bearer " + CLIENT_KEY.encode() + b"\r\n\r\n0\r\nX: ",
        b"x" * 100_000,
        b"",
    ),
}


@pytest.mark.parametrize(("settings", "start", "piece", "expected"), ENDLESS.values(), ids=ENDLESS)
def test_a_client_that_goes_on_sending_is_disconnected(
    settings: DoorSettings, start: bytes, piece: bytes, expected: bytes
) -> None:
    seconds = 1.0 if expected else 3600.0  # the size of a header is bounded, too
    answered = with_server(guarded(Engine(), settings), lambda port: endless(port, start, piece), seconds)
    assert answered.startswith(b"HTTP/1.1" + expected) if expected else answered == b""


def test_an_engine_without_httptools_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn would read with h11 in silence, and chunks of one byte then stop the event loop for seconds."""
    for module in ("uvicorn.protocols.http.httptools_impl", "kimi_w4a8_eagle3.door.connections"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "httptools", None)
    with pytest.raises(KimiError, match="httptools is not installed"):
        _bound_connections()
