"""The engine as the gateway sees it: SGLang's /generate and /abort_request on loopback, with this start's secret."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from .errors import CONTEXT_EXCEEDED, Refusal

_OVERFLOW = re.compile(
    r"(longer than the model's context|exceeds the (model's )?maximum|context length)", re.IGNORECASE
)
_GRAMMAR_FAULT = "Grammar accept_token failed"
_READ_BYTES = 2**20


class EngineGone(Refusal):
    """The engine does not answer, or ended while it did."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is not available: {why}", status=503)


class Engine:
    """Client of the engine that `point` named last. Used from one event loop."""

    def __init__(self) -> None:
        self._url, self._headers = "", dict[str, str]()
        self._session: aiohttp.ClientSession | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def point(self, url: str, secret: str) -> None:
        """Ask another engine from now on. secret: of its start; every path of it needs it."""
        old, self._session = self._session, None
        self._url, self._headers = url, {"Authorization": f"Bearer {secret}"} if secret else {}
        if old is not None:
            await old.close()

    async def close(self) -> None:
        """Send the aborts that wait, and close all connections."""
        await asyncio.gather(*self._aborting, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def ask(self, path: str, body: object = None) -> Any:
        """Return the JSON answer of GET, or of POST with a body; raise EngineGone without an answer."""
        read = await self.read(path, None if body is None else orjson.dumps(body))
        try:
            return orjson.loads(read) if read else None
        except orjson.JSONDecodeError as error:
            raise EngineGone(type(error).__name__) from None

    async def read(self, path: str, data: bytes | None = None) -> bytes:
        """Return the answer of GET, or of POST with data; raise EngineGone without one."""
        method = "GET" if data is None else "POST"
        try:
            async with self._client().request(method, path, data=data, timeout=_timeout(30)) as answer:
                read = await answer.read()
                if answer.status != 200:
                    raise _refusal(answer.status, read)
                return read
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineGone(type(error).__name__) from None

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what the engine answers: one object, or the objects of a stream, each with what is new.

        The request is aborted when the caller stops before its end. Raise Refusal for an error of the engine.
        """
        ended = False
        try:
            async with self._client().post("/generate", data=orjson.dumps(body), timeout=_timeout(None)) as answer:
                if answer.status != 200:
                    ended = True
                    raise _refusal(answer.status, await answer.read())
                if not body.get("stream"):
                    read = orjson.loads(await answer.read())
                    ended = True
                    yield _checked(read)
                    return
                async for event in _events(answer.content):
                    if "error" in event:
                        ended = True
                        raise _refusal(int(event["error"].get("code") or 500), orjson.dumps(event))
                    ended = event["meta_info"]["finish_reason"] is not None
                    yield _checked(event)
                if not ended:  # a scheduler that dies cuts the stream
                    ended = True
                    raise EngineGone("it ended while it answered")
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            ended = True
            raise EngineGone(type(error).__name__) from None
        finally:
            if not ended:
                self.abort(body["rid"])

    def abort(self, rid: str) -> None:
        """End a request in the engine, without waiting for it."""
        task = asyncio.ensure_future(self._abort(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, rid: str) -> None:
        with suppress(Refusal):
            await self.ask("/abort_request", {"rid": rid})

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            if not self._url:
                raise EngineGone("none has started")
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)  # SGLang closes idle ones after 5 s
            headers = {**self._headers, "Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(
                self._url, headers=headers, connector=connector, trust_env=False, read_bufsize=_READ_BYTES
            )
        return self._session


def _timeout(seconds: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, connect=5)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects of a stream of server-sent events."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
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
