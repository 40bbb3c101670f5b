"""The metrics of an engine, and acceptance from counts of verify steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from ..base.errors import KimiError
from ..base.http import bearer, trusted
from ..base.prometheus import Reading

NAN_LOGITS = "kimi_nan_logits_total"  # the plugin's counter: rows of logits with a NaN
FAILED_REQUESTS = "kimi_failed_requests_total"  # the plugin's counter: requests that ended by an error in the engine
_TIMEOUT_S = 10.0


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


def read_once(base_url: str, key: str | None = None, timeout_s: float = _TIMEOUT_S) -> Reading:
    """Read /metrics once; raise KimiError when the answer is not an exposition."""
    url = f"{base_url}/metrics"
    try:
        response = httpx.get(url, headers=bearer(key), timeout=timeout_s, follow_redirects=True, verify=trusted())
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


def acceptance_from_histograms(histograms: Iterable[Sequence[int]], num_draft_tokens: int) -> Acceptance | None:
    """Compute acceptance from per-request histograms (`spec_correct_drafts_histogram`: [k] = steps that accepted k)."""
    depth = num_draft_tokens - 1
    totals = [0] * (depth + 1)
    for histogram in histograms:
        for accepted, count in enumerate(histogram):
            totals[min(accepted, depth)] += count
    steps = sum(totals)
    if steps == 0:
        return None
    accepted = sum(k * n for k, n in enumerate(totals))
    per_position = tuple(sum(totals[i:]) / steps for i in range(1, depth + 1))
    length = accept_length(accepted + steps, 0, steps)  # a step commits its accepted drafts and the bonus token
    return Acceptance(length, accepted / (steps * depth), steps, per_position)
