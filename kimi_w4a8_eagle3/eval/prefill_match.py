"""Does decoding agree with a prefill of the same tokens? A check that needs no equal bits, so it holds on GPUs.

The server without speculation prefills every answer of both servers, alone and without its prefix cache. Each token
then has two logprobs: the one that the decode or verify step reported, and that of the prefill. Rounding sets them
apart on both servers, so the server without speculation says by how much. A verify step that accepts what it should
not, or that reads wrong keys and values, sets them further apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from .significance import holm
from .tokens import Prefill, Tokens

ALPHA = 0.001  # one false alarm in a thousand runs
# Kernels for four rows round otherwise than kernels for one. Rounding that is twice as coarse puts few answers four
# times as far away, since answers to the same prompt differ by a factor of two on one server, too.
FACTOR = 4.0
FLOOR = 1e-3  # nats that are no difference: logprobs are float32
Texts = Sequence[tuple[tuple[int, ...], Tokens]]  # (prompt ids, answer)


@dataclass(frozen=True)
class Measure:
    """One distance to the prefill, in nats a token: means of both servers, and answers further away than rounding.

    further: answers over FACTOR times as far away as the reference's answer to the same prompt. nearer: the reverse.
    beyond: over FACTOR times as far as the reference's worst answer. p: the chance of as many without a fault, after
    Holm's adjustment over all measures.
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
            f"{self.what}: {self.found:.4f} nats a token, {self.reference:.4f} without speculation; of {self.answers} "
            f"answers {self.further} are over {FACTOR:g} times as far away and {self.nearer} over {FACTOR:g} times as "
            f"near, {self.beyond} over {FACTOR:g} times as far as any"
        )


@dataclass(frozen=True)
class PrefillMatch:
    """The comparison. not_best: tokens that are not the best of the logits that they were verified with."""

    tokens: int
    not_best: int
    largest_gap: float
    measures: tuple[Measure, ...]

    @property
    def problems(self) -> list[str]:
        """What shows a fault, in sentences; empty without one."""
        found = []
        if self.not_best:
            found.append(
                f"{self.not_best} of {self.tokens} tokens are not the best of the logits that they were verified "
                f"with, by up to {self.largest_gap:.3f} nats: the verify step accepts what the model did not choose"
            )
        return found + [f"more than rounding: {m} (p = {m.p:.2g})" for m in self.measures if m.p < ALPHA]


def compare(reference: Texts, found: Texts, prefills: Mapping[tuple[int, ...], Prefill]) -> PrefillMatch:
    """Compare both servers' answers to the same prompts; prefills: by the ids of prompt and answer."""
    away = [[_away(answer, prefills[prompt + answer.ids]) for prompt, answer in texts] for texts in (reference, found)]
    lost = [[_lost(prefills[prompt + answer.ids]) for prompt, answer in texts] for texts in (reference, found)]
    gaps = [gap for _, answer in found for gap in own_gaps(answer) if gap > FLOOR]
    measures = _measure("logprobs away from a prefill's", *away), _measure("tokens below a prefill's best", *lost)
    adjusted = holm([measure.p for measure in measures])
    judged = tuple(replace(measure, p=p) for measure, p in zip(measures, adjusted, strict=True))
    return PrefillMatch(sum(len(answer.chosen) for _, answer in found), len(gaps), max(gaps, default=0.0), judged)


def own_gaps(answer: Tokens) -> list[float]:
    """By how much each token's logprob lies below the best of its own step: 0 for every greedy token."""
    return [top[0][0] - chosen for chosen, top in zip(answer.chosen, answer.top, strict=False) if top]


def _away(answer: Tokens, prefill: Prefill) -> float:
    return _mean([abs(a - b) for a, b in zip(answer.chosen, prefill.chosen, strict=False)])


def _lost(prefill: Prefill) -> float:
    return _mean([best - chosen for chosen, best in zip(prefill.chosen, prefill.best, strict=True)])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _measure(what: str, reference: Sequence[float], found: Sequence[float]) -> Measure:
    """Two tests in one: McNemar's by prompt finds what moves many answers, `beyond` what spoils a few of them.

    Without a fault as many answers are further away as are nearer. Of 2n exchangeable answers the m largest all belong
    to one server with a chance of at most 2**-m. The smaller p of the two counts double.
    """
    from scipy.stats import binomtest  # optional: scipy, a second

    further = sum(b > FACTOR * a + FLOOR for a, b in zip(reference, found, strict=True))
    nearer = sum(a > FACTOR * b + FLOOR for a, b in zip(reference, found, strict=True))
    beyond = sum(b > FACTOR * max(reference) + FLOOR for b in found)
    apart = further + nearer
    paired = float(binomtest(further, apart, alternative="greater").pvalue) if apart else 1.0
    p = min(1.0, 2 * min(paired, 2.0**-beyond))
    return Measure(what, fmean(reference), fmean(found), further, nearer, beyond, len(found), p)
