"""Seeded and penalized answers of two servers, which only rounding may change.

The noise of a draw depends on the request's seed and on the position alone, and penalties on the request's own tokens.
So an answer is the same with drafts, in any batch, until rounding turns a near tie. What rounding does is read off the
reference, which answers in batches of two sizes. Faults of noise, penalties or acceptance change most answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .significance import more_often_p
from .tokens import Tokens

KINDS: dict[str, dict[str, Any]] = {
    "seeded": {},
    "penalized": {
        "temperature": 0.0,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_new_tokens": 16,
    },
}
LEVELS = (8, 40)  # concurrencies
LENGTH = 32  # tokens; rounding changes more of longer answers
ALPHA = 0.001
# Of the answers, beyond those that rounding changes: a verify step may round otherwise than a decode step.
_MARGIN = 0.25

Drawn = Mapping[int, Sequence[Tokens]]  # by concurrency, an answer to each prompt


@dataclass(frozen=True)
class DrawnMatch:
    """Answers of one kind. differing: of `answers`, from the reference's. own: of `prompts`, in another batch."""

    kind: str
    answers: int
    differing: int
    prompts: int
    own: int
    p: float

    @property
    def differs(self) -> bool:
        more = self.differing / self.answers - self.own / self.prompts if self.answers else 0.0
        return self.depends_on_batch or (self.p < ALPHA and more > _MARGIN)

    @property
    def depends_on_batch(self) -> bool:
        return 2 * self.own > self.prompts

    def __str__(self) -> str:
        own = f"{self.own} of {self.prompts} of the reference's own differ in another batch"
        if self.depends_on_batch:
            return f"{self.kind} answers depend on their batch: {own}"
        found = f"{self.differing} of {self.answers} {self.kind} answers have other tokens than the reference's"
        return f"{found}, and {own} (p {self.p:.2g})"


def params_of(kind: str, request: int, temperature: float) -> dict[str, Any]:
    """Return SGLang's sampling parameters of one request; its number is its seed."""
    return {"temperature": temperature, "sampling_seed": request, "max_new_tokens": LENGTH, **KINDS[kind]}


def compare(kind: str, reference: Drawn, found: Drawn) -> DrawnMatch:
    """Compare two servers' answers of one kind at the same concurrencies."""
    first, *rest = LEVELS
    own = [[a.ids != b.ids for a, b in zip(reference[first], reference[level], strict=True)] for level in rest]
    pairs = [pair for level in LEVELS for pair in zip(reference[level], found[level], strict=True)]
    changed, differing = sum(map(any, zip(*own, strict=True))), sum(a.ids != b.ids for a, b in pairs)
    prompts = len(reference[first])
    p = more_often_p(differing, len(pairs), changed, prompts)
    return DrawnMatch(kind, len(pairs), differing, prompts, changed, p)
