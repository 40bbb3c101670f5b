"""Bounds on what one request, and all running requests of one key, may cost others."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from .conversation import Conversation
from .errors import Refusal

# Logprobs are formatted in the event loop, 2 µs for each: those of a prompt and of a stream in pieces, those of any
# other answer in one, which takes 17 ms.
MAX_LOGPROBS, MAX_WHOLE_LOGPROBS = 65536, 8192
MAX_CANDIDATES = 512  # of all running answers of one key, each with its top_logprobs and one
MAX_UNREAD_BYTES = 2**28  # of the bodies of one key that arrive, or wait to be read


class Running:
    """Requests of each key that this worker answers. most: of one key, 0 for any number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests: Counter[str] = Counter()
        self._candidates: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextmanager
    def place(self, key: str, candidates: int = 0) -> Iterator[None]:
        """Hold a place for a request, up to its last byte; raise Refusal where the key has none left."""
        if self._most and self._requests[key] >= self._most:
            raise Refusal(f"{self._most} requests of this key are running; try again", status=429)
        if candidates and self._candidates[key] and self._candidates[key] + candidates > MAX_CANDIDATES:
            why = f"the running answers of this key have {self._candidates[key]} logprobs a token"
            raise Refusal(f"{why}, and {MAX_CANDIDATES} are allowed; try again", status=429)
        self._requests[key] += 1
        self._candidates[key] += candidates
        try:
            yield
        finally:
            self._requests[key] -= 1
            self._candidates[key] -= candidates

    @contextmanager
    def unread(self, key: str) -> Iterator[Callable[[int], None]]:
        """Yield what counts the bytes of a body as they arrive, until it is read; it raises Refusal for too many."""
        arrived = 0

        def count(size: int) -> None:
            nonlocal arrived
            if self._unread[key] and self._unread[key] + size > MAX_UNREAD_BYTES:
                raise Refusal("too many large requests of this key arrive at once; try again", status=429)
            self._unread[key] += size
            arrived += size

        try:
            yield count
        finally:
            self._unread[key] -= arrived

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Let one request of each key be read at a time, so that other keys wait for one and not for thousands."""
        async with self._turns[key]:
            await asyncio.sleep(0)  # requests of other keys come before the next one of this key
            yield


def candidates_of(conversation: Conversation) -> int:
    """Return the logprobs a step of a request's answers."""
    return 0 if conversation.logprobs is None else conversation.sampling.n * (1 + conversation.logprobs)


def bound_logprobs(candidates: int, tokens: int | None, room: int, streamed: bool) -> int:
    """Return the most tokens of an answer with these logprobs; raise Refusal where the client asked for more.

    tokens: None without a limit of the client's, where the answer ends at the bound. room: in the context.
    """
    most = MAX_LOGPROBS if streamed else MAX_WHOLE_LOGPROBS
    if tokens is None:
        return max(1, min(room, most // candidates)) if candidates else room
    if tokens * candidates > most:
        raise Refusal(
            f"an answer{'' if streamed else ' that is not streamed'} may have {most} logprobs, tokens times candidates "
            f"of all answers; this request asks for {tokens * candidates}: send fewer top_logprobs, a smaller "
            "max_tokens or n" + ("" if streamed else ', or "stream": true'),
            param="logprobs",
        )
    return tokens
