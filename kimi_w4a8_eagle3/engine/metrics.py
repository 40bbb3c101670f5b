"""Counters from SGLang's Prometheus endpoint before and after a run, and acceptance from their differences.

The server's own accept-length gauge is an average since its start or last flush. A run's exact figure comes from two
counters that every finished request adds to. The names are those of the pinned SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import httpx

from ..base.errors import KimiError
from ..base.http import trusted
from ..base.prometheus import Reading

GENERATION_TOKENS = "sglang:generation_tokens_total"
PROMPT_TOKENS = "sglang:prompt_tokens_total"
VERIFY_CALLS = "sglang:spec_verify_calls_total"
REQUESTS = "sglang:num_requests_total"
CACHED_TOKENS = "sglang:cached_tokens_total"
NAN_LOGITS = "kimi_nan_logits_total"  # the plugin's counter: rows of logits with a NaN
FAILED_REQUESTS = "kimi_failed_requests_total"  # the plugin's counter: requests that ended by an error in the engine
_NAMES = (GENERATION_TOKENS, PROMPT_TOKENS, VERIFY_CALLS, REQUESTS, CACHED_TOKENS)
_PAUSE_S = 0.5
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Counters:
    """Running totals of one server, summed over their labels (`is_streaming`, ranks of one engine).

    cached_tokens: prompt tokens that were found in the prefix cache.
    """

    generation_tokens: float
    prompt_tokens: float
    verify_calls: float
    requests: float
    cached_tokens: float = 0.0

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


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of requests.

    length: tokens committed per verify step, including the bonus token (1.0: no draft was ever accepted).
    rate: accepted draft tokens / proposed draft tokens. per_position[i]: share of verify steps in which draft token
    i+1 was accepted; empty when only counters are known. steps: verify steps counted.
    """

    length: float
    rate: float
    steps: int
    per_position: tuple[float, ...] = ()


def scrape(base_url: str, timeout_s: float = _TIMEOUT_S) -> Counters:
    """Read the counters; raises KimiError as `read` does."""
    return Counters.of(read(base_url, timeout_s))


def read(base_url: str, timeout_s: float = _TIMEOUT_S, attempts: int = 10) -> Reading:
    """Read the metrics of an engine, or of all replicas at an ops endpoint.

    An ops endpoint leaves out a replica that answers slowly, and its counters would seem to fall, so it is read again.
    Raises KimiError when the server does not answer, runs without --enable-metrics, or a replica stays away.
    """
    for _ in range(attempts):
        reading = read_once(base_url, timeout_s)
        missing = reading.labels("kimi_replica_up", "replica", 0.0)
        if not missing:
            return reading
        time.sleep(_PAUSE_S)
    raise KimiError(
        f"no metrics of replica {', '.join(missing)}",
        where=f"{base_url}/metrics",
        expected="the counters of all replicas before and after a load",
        remedy="see /status of the ops endpoint, and measure when all replicas are ready",
    )


def read_once(base_url: str, timeout_s: float = _TIMEOUT_S) -> Reading:
    """Read /metrics once; raise KimiError when the answer is not an exposition."""
    url = f"{base_url}/metrics"
    try:
        response = httpx.get(url, timeout=timeout_s, follow_redirects=True, verify=trusted())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise KimiError(
            f"no metrics: {str(error) or type(error).__name__}", where=url, remedy="check that the server is running"
        ) from error
    if response.status_code != 200:
        raise KimiError(
            f"no metrics: HTTP {response.status_code}",
            where=url,
            expected="Prometheus text",
            remedy="start the server with --enable-metrics (every recipe does)",
        )
    try:
        return Reading.parse(response.text)
    except ValueError as error:
        raise KimiError(f"no metrics: {error}", where=url, expected="Prometheus text") from error


def accept_length(tokens: float, requests: float, steps: float) -> float:
    """Return the tokens that verify steps committed, by step, for `tokens` generated tokens.

    The first token of every request comes from prefill, not from a verify step, so it is subtracted. SGLang's own
    `spec_accept_length` of a request counts it, and can therefore exceed the number of draft tokens.
    """
    return (tokens - requests) / steps


def acceptance_from_counters(delta: Counters, num_draft_tokens: int) -> Acceptance | None:
    """Return the exact accept length of a run, or None without speculation (no verify call was counted)."""
    if delta.verify_calls <= 0:
        return None
    length = accept_length(delta.generation_tokens, delta.requests, delta.verify_calls)
    return Acceptance(length=length, rate=(length - 1) / (num_draft_tokens - 1), steps=round(delta.verify_calls))


def acceptance_from_histograms(histograms: Iterable[Sequence[int]], num_draft_tokens: int) -> Acceptance | None:
    """Compute acceptance from per-request histograms (`spec_correct_drafts_histogram`: [k] = steps that accepted k)."""
    depth = num_draft_tokens - 1
    totals = sum_histograms(histograms, depth)
    steps = sum(totals)
    if steps == 0:
        return None
    accepted = sum(k * n for k, n in enumerate(totals))
    per_position = tuple(sum(totals[i:]) / steps for i in range(1, depth + 1))
    length = accept_length(accepted + steps, 0, steps)  # a step commits its accepted drafts and the bonus token
    return Acceptance(length, accepted / (steps * depth), steps, per_position)


def sum_histograms(histograms: Iterable[Sequence[int]], depth: int) -> list[int]:
    """Add up histograms of all requests: [k] = steps that accepted k drafts, for k in 0..depth."""
    totals = [0] * (depth + 1)
    for histogram in histograms:
        for accepted, steps in enumerate(histogram):
            totals[min(accepted, depth)] += steps
    return totals
