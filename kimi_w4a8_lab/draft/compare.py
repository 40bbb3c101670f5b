"""Compare two drafts on held-out conversations, by kind of traffic, with a verdict on each kind and on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kimi_w4a8_eagle3.base.errors import KimiError

from ..base.verdict import Verdict
from ..speed.statistics import Interval
from .acceptance import SERVED_STEPS, Walk, difference, length, measured, walks
from .collected import Collected, by_kind
from .eagle3 import Draft
from .states import StoredStates

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


@dataclass(frozen=True)
class Judge:
    """Measures drafts of one target. embedding: the target's, [vocab, hidden]."""

    states: StoredStates
    embedding: Tensor

    def walks(self, draft: Draft, conversations: Sequence[Collected]) -> list[Walk]:
        """Walk the draft over the conversations, with the number of steps that are served."""
        return walks(draft, conversations, self.states, self.embedding, SERVED_STEPS)

    def lengths(self, draft: Draft, conversations: Sequence[Collected]) -> dict[str, float]:
        """Return the draft's accept length on each kind of conversations."""
        return {kind: length(self.walks(draft.eval(), some)) for kind, some in by_kind(conversations).items()}

    def kept(
        self, first: Draft, draft: Draft, chosen: Sequence[Collected], most_lost: float
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        """Move the trained `draft` back towards `first` until no kind loses more than `most_lost` of accept length.

        On the way back the loss on what `first` knows falls faster than the gain on what it does not know. Return the
        part of the way that is left, and the accept lengths by kind of `first` and of the result. Raises KimiError if
        every part of the way loses too much.
        """
        before = self.lengths(first, chosen)
        old, new = first.state_dict(), {name: value.clone() for name, value in draft.state_dict().items()}
        for part in range(10, 0, -1):
            draft.load_state_dict({name: old[name].lerp(new[name], part / 10) for name in old})
            after = self.lengths(draft, chosen)
            if all(after[kind] >= before[kind] - most_lost for kind in before):
                return part / 10, before, after
        lost = {kind: round(before[kind] - after[kind], 2) for kind in before if after[kind] < before[kind]}
        remedy = "collect or import more of these kinds, or train with a larger --keep or --most-lost"
        raise KimiError(f"a tenth of the training already loses {lost}", "--most-lost", f"at most {most_lost}", remedy)

    def compare(self, old: Draft, new: Draft, held_out: Sequence[Collected]) -> list[KindOfTraffic]:
        """Compare two drafts by kind. Raises KimiError if the held-out replies have no token that a draft guesses."""
        found = []
        for kind, members in by_kind(held_out).items():
            before, after = self.walks(old, members), self.walks(new, members)
            pairs = [pair for pair in zip(before, after, strict=True) if pair[0].verifications]
            if not pairs:
                raise KimiError(f"the held-out replies of {kind} have one token each", expected="longer replies")
            before, after = (list(side) for side in zip(*pairs, strict=True))
            steps = sum(one.verifications for one in before)
            sides = measured(before), measured(after)
            found.append(KindOfTraffic(kind, len(pairs), steps, *sides, difference(before, after)))
        return found
