"""Compare two drafts on held-out conversations, by kind of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kimi_w4a8_eagle3.base.errors import KimiError

from .acceptance import SERVED_STEPS, Walk, difference, length, measured, walks
from .collected import Collected, by_kind
from .eagle3 import Draft
from .kinds import KindOfTraffic
from .states import StoredStates


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
