"""Answer public endpoints that compute something for each request, at a bounded share of the server's time.

An answer is computed for one caller at a time. It is reused for twenty times as long as it took, at most for a second,
so these endpoints take at most a twentieth of the event loop however often they are called.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from .answers import App, Receive, Refusal, Scope, Send

_SHARE = 20.0
_MOST_S = 1.0
_MAX_QUERIES = 16  # different queries that are answered at a time


@dataclass(frozen=True)
class _Answer:
    messages: list[MutableMapping[str, Any]]
    until: float


class Computed:
    """Recent answers of the application `app`, by path and query. Headers that choose another form are dropped."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._answers: dict[tuple[str, bytes], _Answer] = {}
        self._computing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by path: a health check may wait

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the recent answer, or compute it now; raise Refusal for too many different queries."""
        key = (path, scope.get("query_string", b""))
        if (found := self._recent(key)) is None:
            async with self._computing[path]:
                if (found := self._recent(key)) is None:
                    found = await self._compute(key, scope, receive)
        for message in found.messages:
            await send(message)

    def _recent(self, key: tuple[str, bytes]) -> _Answer | None:
        found = self._answers.get(key)
        return found if found is not None and time.monotonic() < found.until else None

    async def _compute(self, key: tuple[str, bytes], scope: Scope, receive: Receive) -> _Answer:
        start = time.monotonic()
        self._answers = {other: kept for other, kept in self._answers.items() if start < kept.until}
        if len(self._answers) >= _MAX_QUERIES:
            raise Refusal(f"more than {_MAX_QUERIES} different queries at a time", status=429)
        messages: list[MutableMapping[str, Any]] = []

        async def keep(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        headers = [header for header in scope["headers"] if header[0] not in (b"accept", b"accept-encoding")]
        await self._app({**scope, "headers": headers}, receive, keep)
        end = time.monotonic()
        self._answers[key] = found = _Answer(messages, end + min(_MOST_S, _SHARE * (end - start)))
        return found
