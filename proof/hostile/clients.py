"""Hostile clients: each sends one kind of request again and again, in a process of their own."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
SHORT: dict[str, Any] = {
    "model": "kimi-k2.5-tiny", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 4,
    "temperature": 0,
}  # fmt: skip
LONG = {**SHORT, "max_tokens": 48, "ignore_eos": True, "stream": True}
HOSTILE_KEY = "key-of-hostile-clients"
_KEY = f"Authorization: Bearer {HOSTILE_KEY}"
_TIMEOUT_S = 30.0
Attack = Callable[[int], Awaitable[int]]  # one round at a port of loopback; returns its requests


def _request(path: str, body: bytes, *more: str, method: str = "POST") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def _send(port: int, request: bytes, times: int = 1, tail: Sequence[bytes] = ()) -> int:
    """Send a request on one connection, again after each answer; return the answers, the connection's end included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0
    try:
        while answered < times:
            answered += 1
            for piece in (request, *tail):
                writer.write(piece)
                await writer.drain()
            await _answer(reader)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return answered


async def _answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, found, length = head.partition(b"content-length:")
    if found:
        await reader.readexactly(int(length.split(b"\r\n", 1)[0]))
    elif b"chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()


def attack(request: bytes, times: int = 1, connections: int = 1, tail: Sequence[bytes] = ()) -> Attack:
    """Return an attack of some connections at once, with some requests on each."""

    async def one_round(port: int) -> int:
        return sum(await asyncio.gather(*(_send(port, request, times, tail) for _ in range(connections))))

    return one_round


_LONG = json.dumps(LONG).encode()
_NAMES = json.dumps({f"{number:x}": 0 for number in range(16_367)}).encode()
_WITH_LOGPROBS = json.dumps({**LONG, "logprobs": True, "top_logprobs": 16}).encode()
_CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
NO_KEY = {
    "no key": attack(_request(CHAT, _LONG), 50),
    "no key, 2 MiB": attack(_request(CHAT, b" " * 2**21)),
    "no key, OPTIONS": attack(_request("/metrics/", b"", method="OPTIONS"), 50),
    "no key, a header of 60 KiB": attack(_request(CHAT, b"", f"X: {'x' * 61440}")),
    "no key, 200,000 chunks of a byte": attack(_CHUNKED, tail=[b"1\r\nx\r\n" * 1000] * 200 + [b"0\r\n\r\n"]),
}
ATTACKS: dict[str, Attack] = {
    **NO_KEY,
    "16,367 unknown names": attack(_request(CHAT, _NAMES, _KEY), 10),
    "30 streams, 16 top_logprobs": attack(_request(CHAT, _WITH_LOGPROBS, _KEY), connections=30),
    "200 connections, count_tokens": attack(_request(COUNT, json.dumps(SHORT).encode(), _KEY), connections=200),
}


async def _attack(port: int, name: str, done: Counter[str], end: float) -> None:
    while time.monotonic() < end:
        with suppress(OSError, asyncio.TimeoutError):
            done[name] += await asyncio.wait_for(ATTACKS[name](port), _TIMEOUT_S)


def _run(port: int, names: Sequence[str], seconds: float, result: Connection) -> None:
    os.nice(19)  # clients of other machines would take no core of this one

    async def all_of_them() -> Counter[str]:
        done, end = Counter[str](), time.monotonic() + seconds
        await asyncio.wait([asyncio.ensure_future(_attack(port, name, done, end)) for name in names], timeout=seconds)
        return done

    result.send(asyncio.run(all_of_them()))


@contextmanager
def hostile(port: int, names: Sequence[str], seconds: float) -> Iterator[Connection]:
    """Run the named attacks at once for some seconds; the connection then has the requests of each."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(port, names, seconds, sender))
    process.start()
    try:
        yield receiver
        process.join()
    finally:
        process.kill()
        process.join()
