"""Divide the server among its clients: places that they wait for, and memory that they hold.

A client has an account for its key, where there are keys, and one for its connection. Each place charges the seconds
that it is held. The next place goes to the client whose key, and then whose connection, has used least lately.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from .answers import Refusal

_HALF_S = 10.0  # seconds in which what a client has used counts half
_MAX_ACCOUNTS = 4096  # of the last users
_LIGHT_S = 1.0  # a client that has used less lately is light: agents convert a request in less than 0.1 s
_QUEUE_S = 10.0
ANSWER_S = 1e-7  # of the event loop for a byte of an answer: a logprob of 90 bytes takes 4 to 11 µs
_TRIM_BYTES, _TRIM_S = 2**24, 5.0  # glibc gives memory back that long after so much was released

Client = tuple[str, ...]  # its accounts, that of its key first
Take = Callable[[int], Awaitable[None]]  # may wait, and raise Refusal
current_client: ContextVar[Client] = ContextVar("current_client", default=("",))
BODIES = 16  # of the largest size that all requests together may hold
KEPT = 1  # of the places in threads and workers, for light clients


class Shares:
    """Accounts of all clients. most_bytes: that all requests hold together, until they are answered.

    A client never holds more than it leaves free, so there is always room for others.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._used: dict[str, tuple[float, float]] = {}  # seconds by account, and when they were counted
        self._held: Counter[str] = Counter()
        self._total = self._released = 0
        self.waiting: dict[asyncio.Future[None], tuple[Client, int]] = {}  # for memory, in the order of arrival

    def used(self, account: str) -> float:
        """Return the seconds that an account has used lately."""
        seconds, when = self._used.get(account, (0.0, 0.0))
        return float(seconds * 0.5 ** ((time.monotonic() - when) / _HALF_S))

    def light(self, accounts: Client) -> bool:
        """Return whether this connection has used little lately."""
        return self.used(accounts[-1]) <= _LIGHT_S

    def charge(self, accounts: Client, seconds: float) -> None:
        """Add seconds to the accounts of a client."""
        for account in accounts:
            before = self.used(account)
            self._used.pop(account, None)  # the order is that of the last use
            self._used[account] = (before + seconds, time.monotonic())
            if len(self._used) > _MAX_ACCOUNTS:
                del self._used[next(iter(self._used))]

    @contextmanager
    def holding(self) -> Iterator[Take]:
        """Yield a function that takes bytes for this request and its client; all are given back at the end.

        It waits, 10 s at most, in the order of arrival. A smaller body passes one that does not fit yet.
        """
        size = 0

        async def take(more: int) -> None:
            nonlocal size
            turn = asyncio.get_running_loop().create_future()
            self.waiting[turn] = current_client.get(), more
            self._give([turn])
            try:
                if not turn.done() and not (await asyncio.wait([turn], timeout=_QUEUE_S))[0]:
                    raise Refusal("bodies of other requests hold the memory for them; try again", status=503)
            finally:
                if self.waiting.pop(turn, None) is None:  # given, even to a client that left in the same moment
                    size += more

        try:
            yield take
        finally:
            self._add(current_client.get(), -size)
            self._give([*self.waiting])
            before, self._released = self._released, self._released + size
            if before < _TRIM_BYTES <= self._released:
                asyncio.get_running_loop().call_later(_TRIM_S, self._trim)

    def _give(self, turns: Iterable[asyncio.Future[None]]) -> None:
        for turn in turns:
            accounts, size = self.waiting[turn]
            if max(self._held[account] for account in accounts) + 2 * size <= self._most_bytes - self._total:
                del self.waiting[turn]
                self._add(accounts, size)
                turn.set_result(None)

    def _add(self, accounts: Client, size: int) -> None:
        self._total += size
        for account in accounts:
            self._held[account] += size
            if not self._held[account]:
                del self._held[account]

    def _trim(self) -> None:
        self._released = 0
        asyncio.get_running_loop().run_in_executor(None, ctypes.CDLL(None).malloc_trim, 0)


class Places:
    """`number` places at a time, in the event loop, in a thread or in a worker; `kept` of them for light clients."""

    def __init__(self, number: int, shares: Shares, kept: int = 0) -> None:
        self._free, self._kept, self._shares = number, kept, shares
        self._waiting: dict[asyncio.Future[None], Client] = {}  # in the order of arrival

    @asynccontextmanager
    async def place(self, patient: bool = False) -> AsyncIterator[None]:
        """Wait for a place, 10 s at most unless `patient`, and hold it."""
        accounts, turn, start = current_client.get(), asyncio.get_running_loop().create_future(), 0.0
        self._waiting[turn] = accounts
        self._next()
        try:
            if not turn.done() and not (await asyncio.wait([turn], timeout=None if patient else _QUEUE_S))[0]:
                raise Refusal("every place in which requests are checked is busy; try again", status=503)
            start = time.monotonic()
            yield
        finally:
            if self._waiting.pop(turn, None) is None:  # what the request's task does before its next wait counts, too
                asyncio.get_running_loop().call_soon(self._leave, accounts, start or time.monotonic())

    def _leave(self, accounts: Client, start: float) -> None:
        self._free += 1
        self._shares.charge(accounts, time.monotonic() - start)
        self._next()

    def _next(self) -> None:
        used, light, waiting = self._shares.used, self._shares.light, self._waiting.items()
        while turns := [turn for turn, client in waiting if self._free > (0 if light(client) else self._kept)]:
            turn = min(turns, key=lambda turn: [*map(used, self._waiting[turn])])
            del self._waiting[turn]
            self._free -= 1
            turn.set_result(None)
