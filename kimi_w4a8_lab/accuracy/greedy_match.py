"""First differences between greedy answers, and whether the reference could have chosen the same token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .prompts import Prompt
from .tokens import Tokens


@dataclass(frozen=True)
class Divergence:
    """First difference of one prompt at one concurrency.

    A token is None where its text ended and the other did not. top2: (logprob, id) of the reference's two best
    candidates at that position. gap: nats by which the reference preferred its own token; None when the other token is
    not among its top candidates. A large gap proves no fault: rounding can change a router's choice of experts, which
    moves logits by nats. A token outside the top candidates does prove a fault.
    """

    prompt: int
    kind: str
    concurrency: int
    position: int
    reference_token: int | None
    token: int | None
    top2: tuple[tuple[float, int], ...]
    gap: float | None
    judgement: Literal["candidate", "bug"]

    def __str__(self) -> str:
        top = ", ".join(f"{token}: {logprob:.4f}" for logprob, token in self.top2)
        gap = "not among its best candidates" if self.gap is None else f"gap {self.gap:.4f}"
        return (
            f"prompt {self.prompt} ({self.kind}) at concurrency {self.concurrency}: token {self.position} is "
            f"{self.token} instead of {self.reference_token}; the reference's top 2: {top}; {gap}: "
            f"{self.judgement if self.judgement == 'candidate' else 'BUG'}"
        )


def divergences(
    prompts: Sequence[Prompt], reference: Sequence[Tokens], found: Sequence[Tokens], concurrency: int
) -> list[Divergence]:
    """Return the first differences, prompt by prompt; `reference` carries top logprobs."""
    return [
        _divergence(number, prompt.kind, expected, actual, concurrency)
        for number, (prompt, expected, actual) in enumerate(zip(prompts, reference, found, strict=True))
        if expected.ids != actual.ids
    ]


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Return the first index at which the sequences differ, counting the end of the shorter one; None if equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _divergence(number: int, kind: str, expected: Tokens, actual: Tokens, concurrency: int) -> Divergence:
    position = first_difference(expected.ids, actual.ids)
    assert position is not None
    wanted = expected.ids[position] if position < len(expected.ids) else None
    got = actual.ids[position] if position < len(actual.ids) else None
    candidates = expected.top[position] if position < len(expected.top) else ()
    logprobs = {token: logprob for logprob, token in candidates}
    gap = logprobs[wanted] - logprobs[got] if wanted in logprobs and got in logprobs else None
    return Divergence(
        prompt=number,
        kind=kind,
        concurrency=concurrency,
        position=position,
        reference_token=wanted,
        token=got,
        top2=tuple(sorted(candidates, reverse=True)[:2]),
        gap=gap,
        judgement="bug" if gap is None else "candidate",
    )
