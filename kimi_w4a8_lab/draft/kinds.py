"""Result of a comparison of two drafts for one kind of traffic, and the verdict on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..speed.statistics import Interval


class DraftVerdict(str, Enum):
    """Verdict on a new draft, with the exit code of the comparison."""

    BETTER = "better"
    WORSE = "worse"
    NOT_SHOWN = "not shown"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]


_EXIT_CODES = {DraftVerdict.BETTER: 0, DraftVerdict.WORSE: 3, DraftVerdict.NOT_SHOWN: 5}


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
    def verdict(self) -> DraftVerdict:
        """Better or worse if the whole interval of the change is above or below 0."""
        assert self.change.low is not None and self.change.high is not None
        if self.change.low > 0:
            return DraftVerdict.BETTER
        return DraftVerdict.WORSE if self.change.high < 0 else DraftVerdict.NOT_SHOWN


def overall(kinds: Sequence[KindOfTraffic]) -> DraftVerdict:
    """Return worse if the new draft is worse for any kind, else better if it is better for one."""
    verdicts = {kind.verdict for kind in kinds}
    order = (DraftVerdict.WORSE, DraftVerdict.BETTER, DraftVerdict.NOT_SHOWN)
    return next(verdict for verdict in order if verdict in verdicts)
