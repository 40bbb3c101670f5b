"""Where two greedy texts part, and whether the reference might have said the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .prompts import Prompt
from .tokens import Tokens


@dataclass(frozen=True)
class Divergence:
    """The first difference of one prompt at one concurrency.

    Tokens are None where one text ended at the token limit and the other did not. top2: (logprob, id) of the
    reference's two best candidates there. gap: by how much the reference preferred its token to the other one (nats;
    None when the other one is not among its best candidates). The size of a gap shows no fault: rounding overturns a
    router's choice of experts, and another expert moves logits by nats. A token that is no candidate does.
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
        gap = "none of its best candidates" if self.gap is None else f"gap {self.gap:.4f}"
        return (
            f"prompt {self.prompt} ({self.kind}) at concurrency {self.concurrency}: token {self.position} is "
            f"{self.token} instead of {self.reference_token}; the reference's top 2: {top}; {gap}: "
            f"{self.judgement if self.judgement == 'candidate' else 'BUG'}"
        )


def divergences(
    prompts: Sequence[Prompt], reference: Sequence[Tokens], found: Sequence[Tokens], concurrency: int
) -> list[Divergence]:
    """First differences, prompt by prompt; `reference` carries top logprobs."""
    return [
        _divergence(number, prompt.kind, expected, actual, concurrency)
        for number, (prompt, expected, actual) in enumerate(zip(prompts, reference, found, strict=True))
        if expected.ids != actual.ids
    ]


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first position where the sequences differ, the end of the shorter one included; None if equal."""
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
