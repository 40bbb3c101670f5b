"""Counters of a server before and after a load. The door reuses an answer of /metrics for at most 1 s."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kimi_w4a8_eagle3.engine.metrics import Acceptance, Counters, acceptance_from_counters, scrape

Answer = TypeVar("Answer")
_STILL_S, _STILL_TRIES = 1.1, 5
_COUNTED_S = 10.0


def still(url: str) -> Counters:
    """Return the counters after they stood still for longer than the door reuses an answer."""
    found = scrape(url)
    for _ in range(_STILL_TRIES):
        time.sleep(_STILL_S)
        last, found = found, scrape(url)
        if found == last:
            break
    return found


def counted(url: str, requests: float, most_s: float) -> Counters:
    """Return the counters when they have `requests`, or after `most_s`: a server counts after its client has read."""
    end = time.monotonic() + most_s
    while (found := scrape(url)).requests < requests and time.monotonic() < end:
        time.sleep(0.1)
    return found


def accepted(
    url: str, draft_tokens: int, ask: Callable[[], Sequence[Answer]]
) -> tuple[Sequence[Answer], Acceptance | None]:
    """Return the answers and their acceptance by the counters, which no other client may move meanwhile."""
    before = still(url)
    answers = ask()
    after = counted(url, before.requests + len(answers), _COUNTED_S)
    return answers, acceptance_from_counters(after.since(before), draft_tokens)
