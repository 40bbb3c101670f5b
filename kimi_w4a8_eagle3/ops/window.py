"""Acceptance of an engine over the last minute and its load over seconds, from counters that a restart resets. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from ..base.prometheus import Reading
from ..engine.metrics import Acceptance, acceptance_from_histograms

SPEC_STEPS = "kimi_spec_steps_total"  # the plugin's counter: verify steps by accepted drafts
Steps = tuple[float, ...]  # [k]: verify steps that accepted k drafts


def spec_steps(reading: Reading) -> Steps:
    """Return an engine's verify steps so far."""
    steps = {int(accepted): count for accepted, count in reading.by(SPEC_STEPS, "accepted").items()}
    return tuple(steps.get(accepted, 0.0) for accepted in range(max(steps, default=-1) + 1))


def increase(now: Steps, before: Steps) -> Steps:
    """Return the steps since `before`; all of them if a count fell, because the engine restarted from zero."""
    gained = tuple(late - early for late, early in zip_longest(now, before, fillvalue=0.0))
    return now if min(gained, default=0.0) < 0 else gained


class AcceptanceWindow:
    """Sum of the increases between samples, for those whose later sample lies in the window.

    One thread adds, any thread reads.
    """

    def __init__(self, num_draft_tokens: int | None, span_s: float = 60.0) -> None:
        self._num_draft_tokens, self._span_s = num_draft_tokens, span_s
        self._last: Steps | None = None
        self._added: tuple[tuple[float, Steps], ...] = ()

    def add(self, now: float, steps: Steps) -> None:
        """Take a sample at `now` seconds (monotonic). The first one only sets the starting point."""
        if self._last is not None:
            recent = (pair for pair in self._added if pair[0] > now - self._span_s)
            self._added = (*recent, (now, increase(steps, self._last)))
        self._last = steps

    def acceptance(self, now: float) -> Acceptance | None:
        """Return the acceptance of the requests that finished in the window; None if no verify step fell in it."""
        recent = [[round(count) for count in steps] for at, steps in self._added if at > now - self._span_s]
        return acceptance_from_histograms(recent, self._num_draft_tokens or max([2, *map(len, recent)]))


SPAN_S = 10.0  # live.html names it
_MODES = ("decode", "prefill_cache", "prefill_compute")


@dataclass(frozen=True)
class Figures:
    """Load of one engine; None where nothing was counted.

    kv_in_use: share of the pool, on the fullest rank. cached: share of prompt tokens from the prefix cache. ttft_ms:
    mean of the streams whose first token came in the window. tpot_ms: mean of the output tokens after the first ones.
    """

    running: int
    queued: int
    kv_in_use: float
    output_tok_s: float | None
    cached: float | None
    ttft_ms: float | None
    tpot_ms: float | None


@dataclass(frozen=True)
class _Sample:
    at: float
    running: int
    queued: int
    kv_in_use: float
    tokens: tuple[float, ...]  # by mode
    times: tuple[tuple[float, ...], ...]  # seconds and counts of both histograms


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
            # SGLang counts an answer that is not streamed as one late first token.
            (_times(reading, "time_to_first_token", is_streaming="true"), _times(reading, "inter_token_latency")),
        )
        kept = self._samples
        while len(kept) > 1 and kept[1].at <= now - self._span_s:  # the last one before the window begins it
            kept = kept[1:]
        if kept and any(new < old for new, old in zip(sample.tokens, kept[-1].tokens, strict=True)):
            kept = ()  # the engine restarted and counts from zero
        self._samples = (*kept, sample)

    def figures(self, now: float) -> Figures | None:
        """Return the figures; None before the first sample and when the engine has not answered for a while."""
        samples = self._samples
        if not samples or samples[-1].at <= now - self._span_s:
            return None
        first, last = samples[0], samples[-1]
        decoded, cached, computed = (new - old for new, old in zip(last.tokens, first.tokens, strict=True))
        gained = [(late[0] - early[0], late[1] - early[1]) for late, early in zip(last.times, first.times, strict=True)]
        # Means, because the histograms' buckets are too wide for medians.
        ttft, tpot = (1000 * seconds / count if count > 0 else None for seconds, count in gained)
        rate = decoded / (last.at - first.at) if last.at > first.at else None
        share = cached / (cached + computed) if cached + computed else None
        return Figures(last.running, last.queued, last.kv_in_use, rate, share, ttft, tpot)


def _times(reading: Reading, name: str, **labels: str) -> tuple[float, ...]:
    return tuple(reading.total(f"sglang:{name}_seconds_{part}", **labels) or 0.0 for part in ("sum", "count"))
