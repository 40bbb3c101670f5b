"""Counters of a server before and after a load, and acceptance from their differences.

The server's own accept-length gauge is an average since its start or last flush. A run's exact figure comes from two
counters that every finished request adds to.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.http import Address
from kimi_w4a8_eagle3.base.prometheus import Reading
from kimi_w4a8_eagle3.engine.metrics import Acceptance, accept_length, read_once

_NAMES = (
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:spec_verify_calls_total",
    "sglang:num_requests_total",
    "sglang:cached_tokens_total",
    "sglang:num_retracted_requests_total",
)
_STILL_S, _STILL_TRIES = 1.1, 5


@dataclass(frozen=True)
class Counters:
    """Running totals of one server, summed over their labels (`is_streaming`, ranks of one engine).

    cached_tokens: prompt tokens that were found in the prefix cache. retracted: requests sent back to the queue.
    """

    generation_tokens: float
    prompt_tokens: float
    verify_calls: float
    requests: float
    cached_tokens: float = 0.0
    retracted: float = 0.0

    @classmethod
    def of(cls, reading: Reading) -> Counters:
        """Take the counters from a reading; a counter that is absent is 0."""
        return cls(*(reading.total(name) or 0.0 for name in _NAMES))

    def since(self, earlier: Counters) -> Counters:
        """Return the increase since `earlier`. Raises KimiError when a counter fell, because the server restarted."""
        delta = Counters(*(after - before for after, before in zip(astuple(self), astuple(earlier), strict=True)))
        if min(astuple(delta)) < 0:
            raise KimiError(
                "a counter of the server went backwards during the measurement",
                where="/metrics",
                expected="one server process from the first to the last request",
                remedy="the server restarted: read its log and measure again",
            )
        return delta


def scrape(engine: Address) -> Counters:
    """Read the counters; raises KimiError as `read_once` does."""
    return Counters.of(read_once(*engine))


def acceptance_from_counters(delta: Counters, num_draft_tokens: int) -> Acceptance | None:
    """Return the exact accept length of a run, or None without speculation (no verify call was counted)."""
    if delta.verify_calls <= 0:
        return None
    length = accept_length(delta.generation_tokens, delta.requests, delta.verify_calls)
    return Acceptance(length=length, rate=(length - 1) / (num_draft_tokens - 1), steps=round(delta.verify_calls))


def still(engine: Address) -> Counters:
    """Return the counters after they stood still for a second."""
    found = scrape(engine)
    for _ in range(_STILL_TRIES):
        time.sleep(_STILL_S)
        last, found = found, scrape(engine)
        if found == last:
            break
    return found


def counted(engine: Address, requests: float, most_s: float) -> Counters:
    """Return the counters when they have `requests`, or after `most_s`: a server counts after its client has read."""
    end = time.monotonic() + most_s
    while (found := scrape(engine)).requests < requests and time.monotonic() < end:
        time.sleep(0.1)
    return found
