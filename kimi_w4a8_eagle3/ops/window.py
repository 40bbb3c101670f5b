"""Acceptance and load of an engine over the last minute, from counters that a restart resets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import reduce
from itertools import zip_longest

from ..base.prometheus import Reading
from ..engine.metrics import Acceptance, Counters, acceptance_from_counters, acceptance_from_histograms

SPEC_STEPS = "kimi_spec_steps_total"  # the plugin's counter: verify steps by accepted drafts


@dataclass(frozen=True)
class SpecTotals:
    """Running totals of one engine.

    histogram[k]: verify steps that accepted k drafts; empty if the engine runs without the plugin's counter.
    counters: SGLang's own counters, which still give the accept length.
    """

    histogram: tuple[float, ...]
    counters: Counters

    @classmethod
    def of(cls, reading: Reading) -> SpecTotals:
        """Take the totals from a reading."""
        steps = {int(accepted): count for accepted, count in reading.by(SPEC_STEPS, "accepted").items()}
        histogram = tuple(steps.get(accepted, 0.0) for accepted in range(max(steps, default=-1) + 1))
        return cls(histogram, Counters.of(reading))

    def since(self, earlier: SpecTotals) -> SpecTotals:
        """Return the increase since `earlier`; the whole total if one fell, because the engine restarted from zero."""
        delta = _combined(self, earlier, -1.0)
        return self if min(*delta.histogram, *astuple(delta.counters)) < 0 else delta

    def plus(self, other: SpecTotals) -> SpecTotals:
        return _combined(self, other, 1.0)


class AcceptanceWindow:
    """Sum of the increases between samples, for those whose later sample lies in the window.

    One thread adds, any thread reads.
    """

    def __init__(self, num_draft_tokens: int | None, span_s: float = 60.0) -> None:
        self.span_s = span_s
        self._num_draft_tokens = num_draft_tokens
        self._last: SpecTotals | None = None
        self._added: tuple[tuple[float, SpecTotals], ...] = ()

    def add(self, now: float, totals: SpecTotals) -> None:
        """Take a sample at `now` seconds (monotonic). The first one only sets the starting point."""
        if self._last is not None:
            recent = (pair for pair in self._added if pair[0] > now - self.span_s)
            self._added = (*recent, (now, totals.since(self._last)))
        self._last = totals

    def acceptance(self, now: float) -> Acceptance | None:
        """Return the acceptance of the requests that finished in the window; None if no verify step fell in it."""
        recent = [added for at, added in self._added if at > now - self.span_s]
        if not recent:
            return None
        total = reduce(SpecTotals.plus, recent)
        if total.histogram:
            steps = tuple(round(count) for count in total.histogram)
            return acceptance_from_histograms([steps], self._num_draft_tokens or len(steps))
        if self._num_draft_tokens is None:
            return None
        return acceptance_from_counters(total.counters, self._num_draft_tokens)


def _combined(one: SpecTotals, other: SpecTotals, sign: float) -> SpecTotals:
    pairs = zip_longest(one.histogram, other.histogram, fillvalue=0.0)
    counters = zip(astuple(one.counters), astuple(other.counters), strict=True)
    return SpecTotals(tuple(a + sign * b for a, b in pairs), Counters(*(a + sign * b for a, b in counters)))


SPAN_S = 30.0
_MODES = ("decode", "prefill_cache", "prefill_compute")
_TIMES = ("time_to_first_token", "inter_token_latency")


@dataclass(frozen=True)
class Figures:
    """Load of one engine; None where nothing was counted.

    kv_in_use: share of the pool, on the fullest rank. cached: share of prompt tokens from the prefix cache. ttft_ms,
    itl_ms: medians.
    """

    running: int
    queued: int
    kv_in_use: float
    output_tok_s: float
    cached: float | None
    ttft_ms: float | None
    itl_ms: float | None


@dataclass(frozen=True)
class _Sample:
    at: float
    running: int
    queued: int
    kv_in_use: float
    tokens: tuple[float, ...]  # by mode
    times: tuple[Mapping[str, float], ...]  # cumulative counts by upper bound, in seconds


class FiguresWindow:
    """Samples of one engine. One thread adds, any thread reads."""

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span_s = span_s
        self._samples: tuple[_Sample, ...] = ()

    def add(self, now: float, reading: Reading) -> None:
        """Take a sample at `now` seconds (monotonic)."""
        sample = _Sample(
            now,
            int(reading.total("sglang:num_running_reqs") or 0),
            int(reading.total("sglang:num_queue_reqs") or 0),
            reading.largest("sglang:token_usage") or 0.0,
            tuple(reading.total("sglang:realtime_tokens_total", mode=mode) or 0.0 for mode in _MODES),
            tuple(reading.by(f"sglang:{name}_seconds_bucket", "le") for name in _TIMES),
        )
        kept = [one for one in self._samples if one.at > now - self._span_s]
        if kept and any(new < old for new, old in zip(sample.tokens, kept[-1].tokens, strict=True)):
            kept.clear()  # the engine restarted and counts from zero
        self._samples = (*kept, sample)

    def figures(self, now: float) -> Figures | None:
        """Return the figures; None before the first sample and when the engine has not answered for a while."""
        samples = self._samples
        if not samples or samples[-1].at <= now - self._span_s:
            return None
        first, last = samples[0], samples[-1]
        decoded, cached, computed = (new - old for new, old in zip(last.tokens, first.tokens, strict=True))
        ttft, itl = (_median_ms(new, old) for new, old in zip(last.times, first.times, strict=True))
        rate = decoded / (last.at - first.at) if last.at > first.at else 0.0
        share = cached / (cached + computed) if cached + computed else None
        return Figures(last.running, last.queued, last.kv_in_use, rate, share, ttft, itl)


def _median_ms(now: Mapping[str, float], before: Mapping[str, float]) -> float | None:
    """Return the median of what a histogram gained, linear within its bucket; None if it gained nothing."""
    gained = sorted((float(bound), count - before.get(bound, 0.0)) for bound, count in now.items())
    if not gained or gained[-1][1] <= 0:
        return None
    half, low, below = gained[-1][1] / 2, 0.0, 0.0
    for bound, count in gained:
        if count >= half:
            inside = (half - below) / (count - below)
            return 1000 * (low if bound == float("inf") else low + inside * (bound - low))
        low, below = bound, count
    return None
