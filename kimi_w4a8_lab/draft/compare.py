"""Compare two drafts on held-out conversations, by kind of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kimi_w4a8_eagle3.base.errors import KimiError

from .acceptance import SERVED_STEPS, Walk, WalkedText, difference, measured, walks
from .collected import Collected
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
        answered = [WalkedText(one.tokens, one.replies) for one in conversations]
        states = (self.states.of(one.name, len(one.tokens)) for one in conversations)
        return walks(draft, answered, states, self.embedding, SERVED_STEPS)

    def compare(self, old: Draft, new: Draft, held_out: Sequence[Collected]) -> list[KindOfTraffic]:
        """Compare two drafts by kind. Raises KimiError if the held-out replies have no token that a draft guesses."""
        found = []
        for kind in sorted({one.kind for one in held_out}):
            members = [one for one in held_out if one.kind == kind]
            before, after = self.walks(old, members), self.walks(new, members)
            pairs = [pair for pair in zip(before, after, strict=True) if pair[0].verifications]
            if not pairs:
                raise KimiError(f"the held-out replies of {kind} have one token each", expected="longer replies")
            before, after = (list(side) for side in zip(*pairs, strict=True))
            steps = sum(one.verifications for one in before)
            sides = measured(before), measured(after)
            found.append(KindOfTraffic(kind, len(pairs), steps, *sides, difference(before, after)))
        return found
