"""The engine as the gateway sees it: SGLang's /generate and /abort_request on loopback, with this start's secret."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import orjson

from .engine_connection import EngineConnection, EngineGone
from .errors import CONTEXT_EXCEEDED, Refusal

_OVERFLOW = re.compile(
    r"(longer than the model's context|exceeds the (model's )?maximum|context length)", re.IGNORECASE
)
_GRAMMAR_FAULT = "Grammar accept_token failed"
_CONNECT_S, _ANSWER_S = 5.0, 30.0  # an answer of any path other than /generate
_IDLE_S = 3.0  # SGLang closes idle connections after 5 s


class Engine:
    """Client of the engine that `point` named last. Used from one event loop."""

    def __init__(self) -> None:
        self._host, self._port, self._head = "", 0, ""
        self._idle: deque[tuple[float, EngineConnection]] = deque()  # since a monotonic second
        self._aborting: set[asyncio.Task[None]] = set()

    async def point(self, url: str, secret: str) -> None:
        """Ask another engine from now on. secret: of its start; every path of it needs it."""
        self._close_idle(0.0)
        self._idle = deque()  # connections that are in use go back to the old one
        at = urlsplit(url)
        self._host, self._port = at.hostname or "", at.port or 80
        key = f"Authorization: Bearer {secret}\r\n" if secret else ""
        self._head = f"HTTP/1.1\r\nHost: {at.netloc}\r\n{key}Content-Type: application/json\r\nContent-Length:"

    async def close(self) -> None:
        """Send the aborts that wait, and close all connections."""
        await asyncio.gather(*self._aborting, return_exceptions=True)
        self._close_idle(0.0)

    async def ask(self, path: str, body: object = None) -> Any:
        """Return the JSON answer of GET, or of POST with a body; raise EngineGone without an answer."""
        read = await self.read(path, None if body is None else orjson.dumps(body))
        try:
            return orjson.loads(read) if read else None
        except orjson.JSONDecodeError as error:
            raise EngineGone(type(error).__name__) from None

    async def read(self, path: str, data: bytes | None = None) -> bytes:
        """Return the answer of GET, or of POST with data; raise EngineGone without one."""
        try:
            return await asyncio.wait_for(self._read(path, data), _ANSWER_S)
        except asyncio.TimeoutError as error:
            raise EngineGone(type(error).__name__) from None

    async def _read(self, path: str, data: bytes | None) -> bytes:
        async with self._asked(path, data) as connection:
            return await _whole(connection)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what the engine answers: one object, or the objects of a stream, each with what is new.

        The request is aborted when the caller stops before its end. Raise Refusal for an error of the engine.
        """
        ended = False
        try:
            async with self._asked("/generate", orjson.dumps(body)) as connection:
                if not body.get("stream"):
                    read = orjson.loads(await _whole(connection))
                    ended = True
                    yield _checked(read)
                    return
                async for event in _events(connection):
                    if "error" in event:
                        raise _refusal(int(event["error"].get("code") or 500), orjson.dumps(event))
                    ended = connection.ending = event["meta_info"]["finish_reason"] is not None
                    yield _checked(event)
                if not ended:  # a scheduler that dies cuts the stream
                    raise EngineGone("it ended while it answered")
        except orjson.JSONDecodeError as error:
            ended = True
            raise EngineGone(type(error).__name__) from None
        except Refusal:
            ended = True
            raise
        finally:
            if not ended:
                self.abort(body["rid"])

    @asynccontextmanager
    async def _asked(self, path: str, data: bytes | None) -> AsyncIterator[EngineConnection]:
        """Send a request; yield its connection, which is kept where the answer was read to its end."""
        self._close_idle(_IDLE_S)
        idle = self._idle
        _, connection = idle.pop() if idle else (0.0, await self._connect())
        try:
            method = "GET" if data is None else "POST"
            connection.send(f"{method} {path} {self._head} {len(data or b'')}\r\n\r\n".encode() + (data or b""))
            yield connection
        finally:
            if connection.ended or connection.ending:
                idle.append((time.monotonic(), connection))
            else:
                connection.transport.close()

    async def _connect(self) -> EngineConnection:
        if not self._host:
            raise EngineGone("none has started")
        connecting = asyncio.get_running_loop().create_connection(EngineConnection, self._host, self._port)
        try:
            _, connection = await asyncio.wait_for(connecting, _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise EngineGone(type(error).__name__) from None
        return connection

    def _close_idle(self, least_s: float) -> None:
        """Close connections that were idle so long, and those behind them whose answer has not ended."""
        while self._idle and self._idle[0][0] + least_s <= time.monotonic():
            self._idle.popleft()[1].transport.close()
        while self._idle and (self._idle[-1][1].transport.is_closing() or not self._idle[-1][1].ended):
            self._idle.pop()[1].transport.close()

    def abort(self, rid: str) -> None:
        """End a request in the engine, without waiting for it."""
        task = asyncio.ensure_future(self._abort(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, rid: str) -> None:
        with suppress(Refusal):
            await self.ask("/abort_request", {"rid": rid})


async def _whole(connection: EngineConnection, first: bytes = b"") -> bytes:
    """Return a whole answer; raise Refusal for an error."""
    pieces = [first]
    while piece := await connection.read():
        pieces.append(piece)
    if connection.status != 200:
        raise _refusal(connection.status, b"".join(pieces))
    return b"".join(pieces)


async def _events(connection: EngineConnection) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects of a stream of server-sent events; raise Refusal for an error."""
    rest = b""
    while piece := await connection.read():
        if connection.status != 200:
            await _whole(connection, piece)
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield orjson.loads(event[6:])


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer; raise Refusal for one that was aborted, whose text is none of the model's."""
    reason = answer["meta_info"]["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        raise _refusal(int(reason.get("status_code") or 500), orjson.dumps({"message": reason.get("message")}))
    return answer


def _refusal(status: int, body: bytes) -> Refusal:
    """Read an error in any of SGLang's forms: flat, in `error`, FastAPI's `detail`, or text."""
    text = body.decode(errors="replace")
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    error = given.get("error", given) if isinstance(given, dict) else {"message": given}
    error = error if isinstance(error, dict) else {"message": error}
    message = str(error.get("message") or error.get("detail") or text)[:2000]
    if _GRAMMAR_FAULT in message:
        return Refusal("no token of this model can follow the grammar of this request")
    if status == 400 and _OVERFLOW.search(message):
        return Refusal(message, code=CONTEXT_EXCEEDED)
    if status >= 500 and status != 503:
        return Refusal("the engine failed on this request", status=500)
    return Refusal(message, status if status in (400, 429, 503) else 500)
