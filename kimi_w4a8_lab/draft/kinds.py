"""Result of a comparison of two drafts for one kind of traffic, and the verdict on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def overall(kinds: Sequence[KindOfTraffic], proofs: Mapping[str, Verdict]) -> Verdict:
    """Return FAIL if the new draft is worse for any kind or proof, else PASS if it is better for one kind.

    proofs: of servers, by text. The first one is of equal answers: without it nothing is better.
    """
    verdicts = [kind.verdict for kind in kinds]
    if Verdict.FAIL in (*verdicts, *proofs.values()):
        return Verdict.FAIL
    shown = Verdict.PASS in verdicts and next(iter(proofs.values()), Verdict.PASS) is Verdict.PASS
    return Verdict.PASS if shown else Verdict.INCONCLUSIVE
