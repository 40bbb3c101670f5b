"""Sends what `requests` describes, and says what came back."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from kimi_w4a8_eagle3.engine.client import bearer

from .requests import KEY, HttpRequest, Wire

ANSWER_WITHIN_S = 90.0  # a worker of the door may take 60
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass(frozen=True)
class FuzzAnswer:
    """status 0: no HTTP answer. error: why there was none; empty where none was to be expected."""

    status: int
    text: str
    seconds: float
    error: str = ""


class FuzzSender:
    """A client with kept connections; used as an async context manager. at_once: connections."""

    def __init__(self, base_url: str, api_key: str | None, at_once: int) -> None:
        self._host, port = base_url.removeprefix("http://").split(":")
        self._port = int(port)
        self._key = bearer(api_key)
        self._key_on_the_wire = (api_key or "none").encode()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once, keepalive_expiry=2.0)
        timeout = httpx.Timeout(ANSWER_WITHIN_S)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, trust_env=False)
        unkept = httpx.Limits(max_keepalive_connections=0)
        self._anew = httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=unkept, trust_env=False)

    async def __aenter__(self) -> FuzzSender:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._anew.aclose()

    async def send(self, what: HttpRequest | Wire) -> FuzzAnswer:
        """Send it and wait for the end of the answer, or leave."""
        began = time.monotonic()
        try:
            status, text = await (self._either(what) if isinstance(what, HttpRequest) else self._wire(what))
        except httpx.TimeoutException:
            return FuzzAnswer(0, "", time.monotonic() - began, "no answer")
        except (httpx.HTTPError, OSError) as error:
            return FuzzAnswer(0, "", time.monotonic() - began, f"the connection broke: {error!r:.200}")
        return FuzzAnswer(status, text, time.monotonic() - began)

    async def _either(self, request: HttpRequest) -> tuple[int, str]:
        """Over a kept connection; once more over a new one where the kept one ends without an answer.

        The server closes what was idle for 5 s, also with a request on its way (RFC 9112, 9.3.1); what it has not read
        then resets the connection.
        """
        try:
            return await self._request(self._http, request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return await self._request(self._anew, request)

    async def _request(self, http: httpx.AsyncClient, request: HttpRequest) -> tuple[int, str]:
        headers = [*request.headers, *(self._key.items() if request.key else ())]
        call = http.request(request.method, request.path, content=request.body, headers=headers)
        if request.leave_after_s is None:
            response = await call
            return response.status_code, response.text
        with suppress(asyncio.TimeoutError):
            response = await asyncio.wait_for(call, request.leave_after_s)
            return response.status_code, response.text
        return 0, ""

    async def _wire(self, wire: Wire) -> tuple[int, str]:
        async with AsyncExitStack() as stack:
            if wire.held_from:
                await self._connected(stack, (wire.held_from, self._port))
            reader, writer = await self._connected(stack)
            received = bytearray()
            reading = asyncio.create_task(_read(reader, received))
            stack.callback(reading.cancel)
            with suppress(OSError):  # a server may cut broken HTTP short
                for number, piece in enumerate(wire.pieces):
                    await asyncio.sleep(wire.pause_s if number else 0)
                    writer.write(piece.replace(KEY.encode(), self._key_on_the_wire))
                    await asyncio.wait_for(writer.drain(), ANSWER_WITHIN_S)
                if wire.half_close:
                    writer.write_eof()
            await asyncio.wait([reading], timeout=wire.patience_s)
        statuses = [int(status) for status in _STATUS.findall(received)]
        return max(statuses, default=0), received[:4096].decode(errors="replace")

    async def _connected(
        self, stack: AsyncExitStack, source: tuple[str, int] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if source is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(source)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
        except OSError:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection)
        stack.callback(writer.close)
        return reader, writer


async def _read(reader: asyncio.StreamReader, received: bytearray) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            received += piece


def message(text: str) -> Any:
    """Return the message of a refusal in any form; empty without one."""
    try:
        answer = json.loads(text)
        while isinstance(answer, dict):
            answer = answer.get("error") or answer.get("message") or answer.get("detail")
    except ValueError:
        return text.strip()
    return answer
