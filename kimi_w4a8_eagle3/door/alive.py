"""A client that waits for a stream: signs of life while the engine computes, and the end of its request when it leaves.

SGLang sends the headers of a chat stream with the first token, and looks every 4 s whether a client has left. Without a
sign of life clients and proxies give up, and send the request again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from .access import CHAT, MESSAGES, RESPONSES
from .answers import App, Receive, Scope, Send

# After SGLang has checked the tokens. A refusal that comes faster, as of a full queue, keeps its status.
_GRACE_S = 1.0
_SILENCE_S = 10.0
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
WITH_SIGNS = frozenset({CHAT, MESSAGES, RESPONSES})  # SGLang's benchmark of the others cannot read comments
_PING = {MESSAGES: b'event: ping\ndata: {"type": "ping"}\n\n'}
_ERROR = {MESSAGES: b"event: error\ndata: %b\n\n"}


class WaitingClient:
    """The client of one request. stream: the endpoint of a stream, else None. silence_s: between signs of life."""

    def __init__(self, stream: str | None, body: bytes, send: Send, silence_s: float = _SILENCE_S) -> None:
        self._stream, self._send, self._silence_s = stream, send, silence_s
        self._body: bytes | None = body
        self._began = self._may_sign = False
        self._failed = False  # after the headers of a success
        self._last_s = 0.0
        self._accepted, self._left = asyncio.Event(), asyncio.Event()
        self._at_leaving: list[Callable[[], object]] = []

    async def serve(self, app: App, scope: Scope, receive: Receive, wrapped: Callable[[Send], Send]) -> None:
        """Run the application, with its `send` wrapped."""
        current.set(self)
        tasks = [asyncio.ensure_future(self._watch(receive))]
        if self._stream is not None:
            tasks.append(asyncio.ensure_future(self._give_signs()))
        try:
            await app(scope, self._receive, wrapped(self._pass_on))
        finally:
            for task in tasks:
                task.cancel()

    def accept(self) -> None:
        """Begin with signs of life: SGLang has checked the tokens, those of a large request in a thread."""
        asyncio.get_running_loop().call_soon_threadsafe(self._accepted.set)

    def at_leaving(self, action: Callable[[], object]) -> None:
        """Call `action` as soon as the client leaves."""
        self._at_leaving.append(action)

    async def _receive(self) -> MutableMapping[str, Any]:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left.set()
        for action in self._at_leaving:
            action()

    async def _give_signs(self) -> None:
        await self._accepted.wait()
        await asyncio.sleep(min(_GRACE_S, self._silence_s))
        if not self._began:
            self._began = self._may_sign = True
            await self._send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
        while True:
            left_s = self._last_s + self._silence_s - time.monotonic()
            if left_s > 0 or not self._may_sign:
                await asyncio.sleep(max(left_s, self._silence_s / 8))
                continue
            self._last_s = time.monotonic()
            ping = _PING.get(self._stream or "", b": ping\n\n")
            await self._send({"type": "http.response.body", "body": ping, "more_body": True})

    async def _pass_on(self, message: MutableMapping[str, Any]) -> None:
        self._last_s = time.monotonic()
        if message["type"] == "http.response.start":
            early, self._began = self._began, True
            self._may_sign = message["status"] == HTTPStatus.OK
            self._failed = early and not self._may_sign
            if early:
                return
        else:
            body = message.get("body", b"")
            if self._failed and body:
                message = {**message, "body": _ERROR.get(self._stream or "", b"data: %b\n\ndata: [DONE]\n\n") % body}
            if self._began and not self._failed:
                self._may_sign = message.get("more_body", False) and body.endswith(b"\n\n")
        await self._send(message)


current: ContextVar[WaitingClient | None] = ContextVar("current", default=None)
