"""Acceptance over the last minute, from counters that grow until a restart resets them. Pure."""

from __future__ import annotations

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
