"""The HTTP client of the gateway, on a socket: cuts anywhere, kept connections, errors, requests that are aborted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kimi_w4a8_eagle3.gateway.engine import Engine, EngineGone
from kimi_w4a8_eagle3.gateway.errors import Refusal

BODY = {"rid": "a" * 32, "stream": True}
EVENTS = [
    {"text": text, "meta_info": {"finish_reason": end and {"type": end}}} for text, end in (("東", None), ("b", "stop"))
]
CHUNKS = [f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS] + [b"data: [DONE]\n\n", b""]
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(c), c) for c in CHUNKS
)
FAULTS = {
    b"HTTP/1.1 400 Bad\r\ncontent-length: 21\r\n\r\n" + b'{"message": "too odd"}'[:21]: (400, "too odd"),
    STREAM[: STREAM.index(b"b")]: (503, "it closed the connection"),
    b"SSH-2.0 no HTTP\r\n\r\n": (503, "it closed the connection"),
    b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: {\n\n": (503, "JSONDecodeError"),
}


def ask(answer: bytes, *, step: int = 1000, stop: bool = False, times: int = 1) -> tuple[list[Any], list[bytes], int]:
    """Return the events, the bodies that the engine got, and its connections; it answers in pieces of `step` bytes."""
    connections, got = 0, list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                head = line if line.lower().startswith(b"content-length") else head
            got.append(await reader.readexactly(int(head.split(b":")[1])))
            for at in range(0, len(answer), step):
                writer.write(answer[at : at + step])
                await asyncio.sleep(0)
            if answer is not STREAM:
                break
        writer.close()

    async def run() -> list[Any]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        engine, found = Engine(), list[Any]()
        await engine.point(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
        try:
            for _ in range(times):
                events = engine.generate(BODY)
                async for event in events:
                    found.append(event)
                    if stop:
                        break
                await events.aclose()
                await asyncio.sleep(0.1)
        finally:
            await engine.close()
            server.close()
        return found

    return asyncio.run(run()), got, connections


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_is_read_however_it_is_cut_and_its_connection_is_kept(step: int) -> None:
    assert ask(STREAM, step=step, times=3) == (EVENTS * 3, [json.dumps(BODY, separators=(",", ":")).encode()] * 3, 1)


def test_a_stream_whose_reader_stops_is_aborted() -> None:
    events, got, connections = ask(STREAM, step=7, stop=True)
    assert (events, got[1:], connections) == (EVENTS[:1], [b'{"rid":"%b"}' % (b"a" * 32)], 2)


@pytest.mark.parametrize("answer", FAULTS)
def test_a_fault_of_the_engine_is_a_refusal_and_is_not_aborted(answer: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        ask(answer)
    status, words = FAULTS[answer]
    assert refused.value.status == status and words in refused.value.message
    assert isinstance(refused.value, EngineGone) == (status == 503)
