"""A load whose every answer is compared with what it must be, in the background of a test that breaks the server.

It exists beside `sglang.bench_serving` because a load generator that measures speed counts a shortened answer as a
quick one.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from kimi_w4a8_eagle3.base.files import write_atomic

from .load_questions import Question
from .load_request import FORBIDDEN, ClientOutcome, LoadClient, Manner, Record

# Three streamed answers to one in one piece.
USUAL: Mapping[Manner, int] = {Manner.STREAM: 3, Manner.PLAIN: 1}
_EXPECT_NO_ANSWER = (Manner.BAD, Manner.LEAVES_PLAIN, Manner.LEAVES_STREAM)
_PAUSE_S = 0.25  # after an error: a client that asks again at once would only measure how fast it is refused


class ClientLoad:
    """`concurrency` clients that ask one request after the other from entry to exit of a `with` block, in a thread.

    mix: how often each manner comes in a cycle. total: stop by itself after so many requests. On a normal exit
    running requests are finished, otherwise dropped.
    """

    def __init__(
        self,
        base_url: str,
        questions: Sequence[Question],
        concurrency: int,
        *,
        mix: Mapping[Manner, int] = USUAL,
        total: int | None = None,
        hang_s: float = 60.0,
        leave_after: int = 5,
        api_key: str | None = None,
    ) -> None:
        self._base_url, self._questions, self._concurrency = base_url, questions, concurrency
        self._manners = [manner for manner, times in mix.items() for _ in range(times)]
        self._total = total
        self._hang_s, self._leave_after, self._api_key = hang_s, leave_after, api_key
        self._numbers = count()
        self._records: list[Record] = []
        self._stop = threading.Event()
        self._drop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)

    @property
    def records(self) -> list[Record]:
        """Requests that have ended so far."""
        return list(self._records)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all `total` requests have ended; False when they have not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drop(self) -> None:
        """Break off the requests that run, as clients that go away."""
        self._stop.set()
        self._drop.set()

    def __enter__(self) -> ClientLoad:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is not None:
            self._drop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with LoadClient(self._base_url, self._api_key, self._hang_s, self._leave_after) as client:
            tasks = [asyncio.create_task(self._asks(client)) for _ in range(self._concurrency)]
            while (running := [task for task in tasks if not task.done()]) and not self._drop.is_set():
                await asyncio.wait(running, timeout=0.1)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _asks(self, client: LoadClient) -> None:
        """One client, one request after the other."""
        while not self._stop.is_set():
            number = next(self._numbers)
            if self._total is not None and number >= self._total:
                return
            turn, which = divmod(number, len(self._questions))  # in every turn a question comes in another manner
            manner = self._manners[(which + turn) % len(self._manners)]
            record = await client.ask(self._questions[which], manner, which)
            self._records.append(record)
            if record.outcome is not ClientOutcome.OK and manner not in _EXPECT_NO_ANSWER:
                await asyncio.sleep(_PAUSE_S)


def forbidden(records: Sequence[Record]) -> list[Record]:
    """Requests whose client could not know that its answer was wrong or not whole."""
    return [record for record in records if record.outcome in FORBIDDEN]


def write_records(path: Path, records: Sequence[Record]) -> None:
    """One JSON line a request."""
    write_atomic(path, "".join(json.dumps(asdict(record)) + "\n" for record in records))


def median_ms(seconds: Iterable[float | None]) -> float:
    """The median in milliseconds of what is known; NaN where nothing is."""
    found = [1000 * value for value in seconds if value is not None]
    return statistics.median(found) if found else math.nan
