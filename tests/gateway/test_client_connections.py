"""Connections of the gateway's clients, on a real uvicorn: half-closed ones are answered, late or odd ones closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.gateway_app import App, ScriptedEngine

from kimi_w4a8_eagle3.gateway.connections import ClientProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


class Patient(ClientProtocol):
    pieces = 0  # of bodies

    def on_body(self, body: bytes) -> None:
        Patient.pieces += 1
        super().on_body(body)


async def slow(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.sleep(1.5)  # longer than the time for a header
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def answer(
    *pieces: bytes, more: Iterable[bytes] = (), half_closed: bool = False, app: Any = slow, seconds: float = 600.0
) -> bytes:
    """Return what a client reads until its connection ends; an empty piece waits for an `ok`."""

    async def run() -> bytes:
        Patient.deadline_s = seconds
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=Patient, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        found = b""
        for piece in chain(pieces, more):
            if reader.at_eof() or reader.exception():
                break
            writer.write(piece)
            await (asyncio.sleep(0.05) if piece else reader.readuntil(b"ok"))
        if half_closed:
            writer.write_eof()
        with suppress(ConnectionError):
            found = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return found

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_that_closes_its_side_after_the_request_is_answered() -> None:
    assert answer(GET + b"\r\n", half_closed=True, seconds=1.0).endswith(b"ok")


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED, EMPTY = b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n"
ENDLESS = {
    "101 headers": (GET, *[b"a: b\r\n"] * 101),
    "18 KB": (GET, *[b"x" * 6000] * 3),
    "a trailer": (POST + CHUNKED + b"\r\n0\r\nX: ", *[b"x" * 6000] * 3),
}


@pytest.mark.parametrize("pieces", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_header_is_cut(pieces: tuple[bytes, ...]) -> None:
    assert answer(*pieces) == b""


@pytest.mark.parametrize("pieces", [(), (GET,), (GET + b"\r\n", b"", GET)], ids=["none", "a part", "a second one"])
def test_a_header_that_does_not_end_in_time_closes_the_connection(pieces: tuple[bytes, ...]) -> None:
    drops = repeat(b"x") if pieces else ()  # which do not renew the time
    assert answer(*pieces, more=drops, seconds=1.0) == b""


KEY = b"Authorization: Bearer key-of-ann-123\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + KEY + b"Connection: close\r\n\r\n"
SIZE = b"%d" % len(HIDDEN)
# Headers and bodies whose end one reader of HTTP may see where another does not; a request of its own hides behind it.
SMUGGLED = {
    "two lengths": (b"Content-Length: 0\r\nContent-Length: %b\r\n" % SIZE, b""),
    "list of lengths": (b"Content-Length: 0, %b\r\n" % SIZE, b""),
    **{f"length {value!r}": (b"Content-Length: %b\r\n" % value, b"")
       for value in (b"+0", b"0x0", b"-1", b"0 1", b"18446744073709551616")},
    "length and chunks": (b"Content-Length: %b\r\n" % SIZE + CHUNKED, EMPTY),
    "chunks and length": (CHUNKED + b"Content-Length: 4\r\n", EMPTY),
    **{f"coding {value!r}": (b"Transfer-Encoding%b\r\nContent-Length: %b\r\n" % (value, SIZE), EMPTY)
       for value in (b": xchunked", b" : chunked", b": \x0bchunked", b": chunked, identity")},
    "two codings": (CHUNKED + b"Transfer-Encoding: identity\r\n", EMPTY),
    "a folded header": (b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: %b\r\n" % SIZE, EMPTY),
    **{f"chunk {value!r}": (CHUNKED, value) for value in (b"0\n\n", b"0x0\r\n\r\n", b"-1\r\n\r\n",
                                                         b"10000000000000000\r\n\r\n", b"1\r\nxy\r\n0\r\n\r\n")},
    "NUL in a name": (b"X\x00: a\r\nContent-Length: 0\r\n", b""),
    "a bare CR": (b"X: a\rContent-Length: %b\r\n" % SIZE, b""),
}  # fmt: skip


@pytest.fixture
def locked(tmp_path: Path) -> Callable[[Any, Any, Any], Any]:
    (file := tmp_path / "keys").touch(0o600)
    file.write_text("ann key-of-ann-123\n")
    return App(ScriptedEngine(), keys=file)


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_whose_end_is_doubtful_closes_the_connection(name: str, locked: Any) -> None:
    headers, body = SMUGGLED[name]
    found = answer(POST + headers + b"\r\n" + body + HIDDEN, app=locked)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1 ") == 1, found


def test_two_requests_with_clear_ends_get_two_answers(locked: Any) -> None:
    found = answer(POST + CHUNKED + KEY + b"\r\n2\r\n{}\r\n" + EMPTY + HIDDEN, app=locked)
    assert found.startswith(b"HTTP/1.1 400") and b"HTTP/1.1 200" in found  # {} has no messages


@pytest.mark.parametrize(("key", "status"), [(b"", b"401"), (KEY, b"400")], ids=["without a key", "with one"])
def test_a_body_in_bytes_is_read_only_with_a_key(key: bytes, status: bytes, locked: Any) -> None:
    Patient.pieces, header = 0, POST + CHUNKED + key + b"\r\n"
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"n": 0}'.rjust(100_000)) + EMPTY
    found = answer(header + body, half_closed=True, app=locked)
    assert found.startswith(b"HTTP/1.1 " + status) and found.count(b"HTTP/1.1") == 1, found
    assert Patient.pieces == 100_000 if key else Patient.pieces < 6000
    if not key:  # and a body that never ends closes the connection
        assert answer(header, b"1\r\nx\r\n", app=locked, seconds=1.0).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "path",
    [b"//v1/models", b"/v1//models", b"/v1/models/../../generate", b"/health/../v1/models", b"/health/..%2fv1/models",
     b"/ready;/v1/models", b"/ready/", b"/%67enerate", b"/v1/models%00", b"/V1/models", b"/.", b"/flush_cache?/ready",
     b"/ready%2f..%2fgenerate", b"/\\generate", b"/%2e%2e/generate"],
)  # fmt: skip
def test_no_spelling_of_a_path_opens_another_one(path: bytes, locked: Any) -> None:
    for key, status in ((b"", b"401"), (KEY, b"404")):
        sent = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%bConnection: close\r\n\r\n" % (path, key)
        assert answer(sent, app=locked).startswith(b"HTTP/1.1 " + status)
