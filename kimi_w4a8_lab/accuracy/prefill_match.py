"""Comparison of decode logprobs with a prefill of the same tokens; it needs no equal bits, so it works on GPUs.

The server without speculation prefills every answer of both servers, alone and without its prefix cache. Each token
then has two logprobs: one from its decode or verify step and one from the prefill. Rounding separates them on both
servers, and the server without speculation shows by how much. A verify step that accepts wrong tokens, or that reads
wrong keys and values, separates them further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .tokens import Prefill, Tokens

ALPHA = 0.001  # one false alarm in a thousand runs
# Kernels for four rows round differently from kernels for one. Twice as coarse a rounding puts few answers four times
# as far away, since answers to the same prompt already differ by a factor of two on one server.
FACTOR = 4.0
_TESTS = 4  # two tests of each of two distances
FLOOR = 1e-3  # nats below which float32 logprobs count as equal
Replies = Sequence[tuple[tuple[int, ...], Tokens]]  # (prompt ids, answer)


@dataclass(frozen=True)
class Measure:
    """Distance to the prefill in nats per token, averaged for each server, and the answers beyond rounding.

    further: answers over FACTOR times as far from the prefill as the reference's answer to the same prompt. nearer: the
    reverse. beyond: answers over FACTOR times as far as the reference's worst one. p: chance of these counts without a
    fault, after Bonferroni's adjustment for two measures with two tests each.
    """

    what: str
    reference: float
    found: float
    further: int
    nearer: int
    beyond: int
    answers: int
    p: float

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.found:.4f} nats per token, {self.reference:.4f} without speculation; "
            f"of {self.answers} answers {self.further} are over {FACTOR:g} times as far away and {self.nearer} over "
            f"{FACTOR:g} times as near, {self.beyond} over {FACTOR:g} times as far as any"
        )


@dataclass(frozen=True)
class PrefillMatch:
    """The comparison. not_best: tokens that are not the argmax of the logits that verified them."""

    tokens: int
    not_best: int
    largest_gap: float
    measures: tuple[Measure, ...]

    @property
    def problems(self) -> list[str]:
        """Findings that show a fault, as sentences."""
        found = []
        if self.not_best:
            found.append(
                f"{self.not_best} of {self.tokens} tokens are not the argmax of the logits that verified them, by up "
                f"to {self.largest_gap:.3f} nats: the verify step accepts tokens that the model did not choose"
            )
        return found + [f"more than rounding: {m} (p = {m.p:.2g})" for m in self.measures if m.p < ALPHA]


def compare(reference: Replies, found: Replies, prefills: Mapping[tuple[int, ...], Prefill]) -> PrefillMatch:
    """Compare both servers' answers to the same prompts; prefills are keyed by the ids of prompt and answer."""
    both = [[(answer, prefills[prompt + answer.ids]) for prompt, answer in texts] for texts in (reference, found)]
    away = [[_apart(answer.chosen, prefill.chosen) for answer, prefill in texts] for texts in both]
    lost = [[_apart(prefill.best, prefill.chosen) for _, prefill in texts] for texts in both]
    # How far each token's logprob lies below the best of its own step: 0 for a greedy token.
    below = (top[0][0] - own for _, answer in found for own, top in zip(answer.chosen, answer.top, strict=False) if top)
    gaps = [gap for gap in below if gap > FLOOR]
    measures = _measure("distance to the prefill's logprobs", *away), _measure("tokens below the prefill's best", *lost)
    return PrefillMatch(sum(len(answer.chosen) for _, answer in found), len(gaps), max(gaps, default=0.0), measures)


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean distance of two sequences of logprobs; 0 without any."""
    return fmean([abs(a - b) for a, b in zip(one, other, strict=False)] or [0.0])


def _measure(what: str, reference: Sequence[float], found: Sequence[float]) -> Measure:
    """Measure a distance with two tests: McNemar's finds small shifts of many answers, `beyond` finds outliers.

    Without a fault as many answers are further away as are nearer. Of 2n exchangeable answers the m largest all belong
    to one server with a probability of at most 2**-m.
    """
    from scipy.stats import binomtest  # optional: scipy, a second

    further = sum(b > FACTOR * a + FLOOR for a, b in zip(reference, found, strict=True))
    nearer = sum(a > FACTOR * b + FLOOR for a, b in zip(reference, found, strict=True))
    beyond = sum(b > FACTOR * max(reference) + FLOOR for b in found)
    apart = further + nearer
    paired = float(binomtest(further, apart, alternative="greater").pvalue) if apart else 1.0
    p = min(1.0, _TESTS * min(paired, 2.0**-beyond))
    return Measure(what, fmean(reference), fmean(found), further, nearer, beyond, len(found), p)
