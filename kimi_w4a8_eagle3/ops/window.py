"""Acceptance of an engine over the last minute and its load over seconds, from counters that a restart resets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ..base.prometheus import Reading
from ..engine.metrics import Acceptance, acceptance_from_histograms

SPAN_S, ACCEPTANCE_SPAN_S = 10.0, 60.0  # of the figures and of the acceptance; live.html names them
_MODES = ("decode", "prefill_cache", "prefill_compute")
SPEC_STEPS = "kimi_spec_steps_total"  # the plugin's counter: verify steps by accepted drafts
Steps = tuple[float, ...]  # [k]: verify steps that accepted k drafts


def spec_steps(reading: Reading) -> Steps:
    """Return an engine's verify steps so far."""
    steps = {int(accepted): count for accepted, count in reading.by(SPEC_STEPS, "accepted").items()}
    return tuple(steps.get(accepted, 0.0) for accepted in range(max(steps, default=-1) + 1))


def increase(now: Sequence[float], before: Sequence[float]) -> Steps:
    """Return what was counted since `before`, one by one."""
    return tuple(late - early for late, early in zip_longest(now, before, fillvalue=0.0))


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
    steps: Steps


class Window:
    """Samples of one engine. One thread adds, any thread reads."""

    def __init__(self, num_draft_tokens: int | None = None) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._samples: tuple[_Sample, ...] = ()

    def add(self, now: float, reading: Reading) -> None:
        """Take a sample at `now` seconds (monotonic). The first one of an engine only sets the starting point."""
        sample = _Sample(
            now,
            int(reading.total("sglang:num_running_reqs") or 0),
            int(reading.total("sglang:num_queue_reqs") or 0),
            reading.largest("sglang:token_usage") or 0.0,
            tuple(reading.total("sglang:realtime_tokens_total", mode=mode) or 0.0 for mode in _MODES),
            # SGLang counts an answer that is not streamed as one late first token.
            (_times(reading, "time_to_first_token", is_streaming="true"), _times(reading, "inter_token_latency")),
            spec_steps(reading),
        )
        kept = self._samples
        while len(kept) > 1 and kept[1].at <= now - ACCEPTANCE_SPAN_S:  # the last one before the window begins it
            kept = kept[1:]
        pairs = [(sample.tokens, kept[-1].tokens), (sample.steps, kept[-1].steps)] if kept else []
        if any(min(increase(*pair), default=0) < 0 for pair in pairs):  # the engine counts from zero again
            kept = ()
        self._samples = (*kept, sample)

    def acceptance(self, now: float) -> Acceptance | None:
        """Return the acceptance over the last minute; None if no verify step fell in it."""
        if (ends := self._ends(now, ACCEPTANCE_SPAN_S)) is None:
            return None
        gained = [round(count) for count in increase(ends[1].steps, ends[0].steps)]
        return acceptance_from_histograms([gained], self._num_draft_tokens or max(2, len(gained)))

    def figures(self, now: float) -> Figures | None:
        """Return the figures; None before the first sample and when the engine has not answered for a while."""
        if (ends := self._ends(now, SPAN_S)) is None:
            return None
        first, last = ends
        decoded, cached, computed = increase(last.tokens, first.tokens)
        gained = [increase(late, early) for late, early in zip(last.times, first.times, strict=True)]
        # Means, because the histograms' buckets are too wide for medians.
        ttft, tpot = (1000 * seconds / count if count > 0 else None for seconds, count in gained)
        rate = decoded / (last.at - first.at) if last.at > first.at else None
        share = cached / (cached + computed) if cached + computed else None
        return Figures(last.running, last.queued, last.kv_in_use, rate, share, ttft, tpot)

    def _ends(self, now: float, span_s: float) -> tuple[_Sample, _Sample] | None:
        """Return the last sample and the one `span_s` or a little more before it; None if the last one is too old."""
        samples = self._samples
        if not samples or samples[-1].at <= now - span_s:
            return None
        begin = samples[-1].at - span_s
        return next((sample for sample in reversed(samples) if sample.at <= begin), samples[0]), samples[-1]


def _times(reading: Reading, name: str, **labels: str) -> tuple[float, ...]:
    return tuple(reading.total(f"sglang:{name}_seconds_{part}", **labels) or 0.0 for part in ("sum", "count"))
