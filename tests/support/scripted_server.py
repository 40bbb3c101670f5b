"""A real server on a real socket. It answers with bytes that a test gives and counts clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_HEAD = "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n"


@dataclass(frozen=True)
class Script:
    """Answer to one request: these parts with a pause before each part. Then the connection is closed.

    hold: keep it open in silence instead, until the client leaves.
    """

    parts: Sequence[bytes]
    pause_s: float = 0.0
    hold: bool = False


def whole(body: Any, status: int = 200, cut: int = 0) -> Script:
    """A body with its length; `cut`: so many of its last bytes are never sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (_HEAD.format(status=status) + f"Content-Length: {len(data)}\r\n\r\n").encode()
    return Script([head + data[: len(data) - cut]])


def streamed(events: Sequence[Any], ended: bool = True, pause_s: float = 0.0, hold: bool = False) -> Script:
    """A chunked answer of `data: ` lines; without `ended` the last chunk, which ends it properly, is missing."""
    parts = [(_HEAD.format(status=200) + "Transfer-Encoding: chunked\r\n\r\n").encode()]
    for event in events:
        line = b"data: " + (event.encode() if isinstance(event, str) else json.dumps(event).encode()) + b"\n\n"
        parts.append(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    return Script([*parts, b"0\r\n\r\n"] if ended else parts, pause_s, hold)


@dataclass
class ScriptedServer:
    """answer: script of the n-th request (from 0) with this body. left: requests whose client went away early."""

    answer: Callable[[int, bytes], Script]
    base_url: str = ""
    requests: int = 0
    left: int = 0
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = (line.partition(": ") for line in head.decode().split("\r\n")[1:])
            headers = {name.lower(): value for name, _, value in lines}
            self.headers.append(headers)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            number, self.requests = self.requests, self.requests + 1
            self.bodies.append(body)
            script = self.answer(number, body)
            gone = asyncio.create_task(reader.read(1))  # ends when the client closes its side
            for part in script.parts:
                await asyncio.sleep(script.pause_s)
                if gone.done():
                    break
                writer.write(part)
                await writer.drain()
            if script.hold and not gone.done():
                await gone
            self.left += gone.done()
            gone.cancel()
        writer.close()


@contextmanager
def scripted_server(answer: Callable[[int, bytes], Script]) -> Iterator[ScriptedServer]:
    """The server in a thread, on a free port of loopback."""
    made, loop, started = ScriptedServer(answer), asyncio.new_event_loop(), threading.Event()

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
