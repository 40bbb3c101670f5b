"""Answer public endpoints that compute something for each request, at a bounded share of the server's time.

An answer is computed once for all callers that wait for it, and goes on when they leave. It is reused for twenty times
as long as it took, at most for a second. These endpoints therefore take at most a twentieth of the event loop, however
often they are called, by any method and with any query. An endpoint whose query is dropped has one answer and is never
refused, so a scraper or a probe sees no limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

from .answers import App, Refusal, Scope, Send

_SHARE = 20.0
_MOST_S = 1.0
_MAX_QUERIES = 16  # different queries that are answered at a time
_QUERIED = ("/v1/loads",)  # where a query chooses a part of the answer; elsewhere it is dropped

Key = tuple[str, bytes]  # path and query
_Messages = list[MutableMapping[str, Any]]  # of an answer


class Computed:
    """Recent answers of the application `app`. Headers that choose another form are dropped."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._answers: dict[Key, _Messages] = {}
        self._running: dict[Key, asyncio.Task[_Messages]] = {}
        self._turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by path: a health check may wait

    async def answer(self, path: str, scope: Scope, send: Send) -> None:
        """Send the recent answer, or the one that is computed now.

        Raise Refusal for other methods than GET and HEAD, and for too many different queries.
        """
        if (method := scope["method"]) not in ("GET", "HEAD"):
            raise Refusal(f"{path} is read with GET", status=405)
        key = (path, scope.get("query_string", b"") if path in _QUERIED else b"")
        if (found := self._answers.get(key)) is None:
            task = self._running.get(key) or self._start(key, scope)
            found = await asyncio.shield(task)  # a caller that leaves does not stop it for the others
        for message in found:
            await send({**message, "body": b""} if method == "HEAD" and "body" in message else message)

    def _start(self, key: Key, scope: Scope) -> asyncio.Task[_Messages]:
        queries = sum(path in _QUERIED for path, _ in (*self._answers, *self._running))
        if key[0] in _QUERIED and queries >= _MAX_QUERIES:
            raise Refusal(f"more than {_MAX_QUERIES} different queries at a time", status=429)
        task = self._running[key] = asyncio.ensure_future(self._compute(key, scope))
        return task

    async def _compute(self, key: Key, scope: Scope) -> _Messages:
        messages: _Messages = []

        async def keep(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        headers = [header for header in scope["headers"] if header[0] not in (b"accept", b"accept-encoding")]
        stays = asyncio.Queue[MutableMapping[str, Any]]()  # a caller that does not leave: others may wait
        stays.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        try:
            async with self._turn[key[0]]:
                start = time.monotonic()
                computed = {**scope, "method": "GET", "query_string": key[1], "headers": headers}
                await self._app(computed, stays.get, keep)
                reused_s = min(_MOST_S, _SHARE * (time.monotonic() - start))
        finally:
            del self._running[key]
        self._answers[key] = messages
        asyncio.get_running_loop().call_later(reused_s, self._answers.pop, key)
        return messages
