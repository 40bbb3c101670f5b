"""Result of a comparison of two drafts for one kind of traffic, and the verdict on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.verdict import Verdict
from ..speed.statistics import Interval

WORDS = {Verdict.PASS: "better", Verdict.FAIL: "worse", Verdict.INCONCLUSIVE: "not shown"}


@dataclass(frozen=True)
class KindOfTraffic:
    """Result for one kind of traffic. old, new: accept length, then the share of steps with more than k guesses right.

    change: of the accept length.
    """

    kind: str
    conversations: int
    steps: int
    old: tuple[Interval, list[Interval]]
    new: tuple[Interval, list[Interval]]
    change: Interval

    @property
    def verdict(self) -> Verdict:
        """PASS or FAIL if the whole interval of the change is above or below 0."""
        if self.change.covers(0.0):
            return Verdict.INCONCLUSIVE
        return Verdict.PASS if self.change.value > 0 else Verdict.FAIL


def overall(kinds: Sequence[KindOfTraffic]) -> Verdict:
    """Return FAIL if the new draft is worse for any kind, else PASS if it is better for one kind."""
    verdicts = [kind.verdict for kind in kinds]
    return next((found for found in (Verdict.FAIL, Verdict.PASS) if found in verdicts), Verdict.INCONCLUSIVE)
