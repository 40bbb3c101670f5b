"""Connections of the gateway's clients, on a real uvicorn: half-closed ones are answered, endless ones closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from kimi_w4a8_eagle3.gateway.connections import ClientProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


class Patient(ClientProtocol):
    deadline_s = 600.0  # so that only the bounds of a header end a connection


async def slow(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def answer(*pieces: bytes, half_closed: bool = False) -> bytes:
    """Return what a client reads until its connection ends."""

    async def run() -> bytes:
        server = uvicorn.Server(uvicorn.Config(slow, port=0, http=Patient, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        if half_closed:
            writer.write_eof()
        found = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        server.should_exit = True
        await serving
        return found

    return asyncio.run(run())


def test_a_client_that_closes_its_side_after_the_request_is_answered() -> None:
    assert answer(GET + b"\r\n", half_closed=True).endswith(b"ok")


@pytest.mark.parametrize("pieces", [[b"a: b\r\n"] * 101, [b"x" * 6000] * 3], ids=["101 headers", "18 KB"])
def test_an_endless_header_is_cut(pieces: list[bytes]) -> None:
    assert answer(GET, *pieces) == b""
