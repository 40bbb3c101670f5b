"""Comparison of two servers' answers as tokens: what rounding explains, and what only a fault explains.

Equal texts are no criterion on a GPU: rounding decides between experts that the router finds nearly equal, and another
expert moves logits by nats. The server without speculation therefore shows how much rounding changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .prompts import Prompt
from .significance import mcnemar_p, more_often_p, same_distribution_p
from .tokens import Prefill, Tokens

ALPHA = 0.001  # one false alarm in a thousand runs, of each kind of comparison
# Of the answers, beyond those that rounding changes: a verify step may round otherwise than a decode step.
_MARGIN = 0.25
# Kernels for four rows round differently from kernels for one. Twice as coarse a rounding puts few answers four times
# as far away, since answers to the same prompt already differ by a factor of two on one server.
FACTOR = 4.0
FLOOR = 1e-3  # nats below which float32 logprobs count as equal
_TESTS = 4  # two tests of each of two distances
SAMPLED = 4  # tokens of a continuation: prefill gives the first one, verify steps give the others
Replies = Sequence[tuple[tuple[int, ...], Tokens]]  # (prompt ids, answer)
Samples = list[tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """First difference of an answer from the reference's, at token `position` (None: at the end of the text).

    gap: nats by which the reference of a greedy answer preferred its own token; None when the other token is not among
    its candidates, which proves a fault. A large gap proves none.
    """

    side: str
    concurrency: int
    request: int
    kind: str
    position: int | None
    what: str
    gap: float | None = None

    def __str__(self) -> str:
        place = "the end" if self.position is None else f"token {self.position}"
        return (
            f"{self.side}, concurrency {self.concurrency}, request {self.request} ({self.kind}): {place}: {self.what}"
        )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Return the first index at which the sequences differ, counting the end of the shorter one; None if equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def greedy_differences(
    prompts: Sequence[Prompt], reference: Sequence[Tokens], found: Sequence[Tokens], side: str, concurrency: int
) -> list[Difference]:
    """Return the first differences, prompt by prompt; `reference` carries top logprobs."""
    differing = []
    for number, (prompt, expected, actual) in enumerate(zip(prompts, reference, found, strict=True)):
        position = first_difference(expected.ids, actual.ids)
        if position is None:
            continue
        wanted, got = (answer.ids[position] if position < len(answer.ids) else None for answer in (expected, actual))
        candidates = expected.top[position] if position < len(expected.top) else ()
        logprobs = {token: logprob for logprob, token in candidates}
        gap = logprobs[wanted] - logprobs[got] if wanted in logprobs and got in logprobs else None
        why = "BUG, it is not among the reference's candidates" if gap is None else f"gap {gap:.4f}"
        what = f"{got} instead of {wanted}: {why}"
        differing.append(Difference(side, concurrency, number, prompt.kind, position, what, gap))
    return differing


@dataclass(frozen=True)
class Match:
    """Answers of one kind. differing: of `answers`, from the reference's. own: of `prompts`, in batches of other sizes.

    Seeded and penalized answers are judged by it: noise depends on the request's seed and position alone, and penalties
    on its own tokens, so only rounding may change an answer. Faults of noise, penalties or acceptance change most.
    """

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


def matched(kind: str, reference: Mapping[int, Sequence[Tokens]], found: Mapping[int, Sequence[Tokens]]) -> Match:
    """Compare two servers' answers of one kind, an answer to each prompt at each concurrency."""
    by_prompt = list(zip(*reference.values(), strict=True))
    own = sum(any(answer.ids != answers[0].ids for answer in answers) for answers in by_prompt)
    pairs = [pair for level in reference for pair in zip(reference[level], found[level], strict=True)]
    differing, prompts = sum(a.ids != b.ids for a, b in pairs), len(by_prompt)
    return Match(kind, len(pairs), differing, prompts, own, more_often_p(differing, len(pairs), own, prompts))


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
    """Logprobs of the decode and verify steps beside those of a prefill of the same tokens.

    not_best: tokens that are not the argmax of the logits that verified them.
    """

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


def against_prefill(reference: Replies, found: Replies, prefills: Mapping[tuple[int, ...], Prefill]) -> PrefillMatch:
    """Compare both servers' answers to the same prompts; prefills are keyed by the ids of prompt and answer.

    Rounding separates a token's two logprobs on both servers. A verify step that accepts wrong tokens, or reads wrong
    keys and values, separates them further.
    """
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
    further = sum(b > FACTOR * a + FLOOR for a, b in zip(reference, found, strict=True))
    nearer = sum(a > FACTOR * b + FLOOR for a, b in zip(reference, found, strict=True))
    beyond = sum(b > FACTOR * max(reference) + FLOOR for b in found)
    p = min(1.0, _TESTS * min(mcnemar_p(further, nearer, "greater"), 2.0**-beyond))
    return Measure(what, fmean(reference), fmean(found), further, nearer, beyond, len(found), p)


@dataclass(frozen=True)
class SamplingMatch:
    """Two-sample tests of sampled continuations. tests: p after Bonferroni's adjustment, by prefix and position.

    ignores_temperature: the reference varies after the first token and the other server never does.
    """

    tests: dict[str, float]
    samples: int
    temperature: float
    ignores_temperature: bool

    @property
    def differs(self) -> bool:
        return self.smallest < ALPHA

    @property
    def smallest(self) -> float:
        """Smallest adjusted p; 1 when the samples did not vary."""
        return min(self.tests.values(), default=1.0)

    def __str__(self) -> str:
        head = f"sampling at temperature {self.temperature:g}, {self.samples} continuations a prefix: "
        if not self.tests:
            return head + "the samples did not vary, so there was nothing to compare"
        if not self.differs:
            return head + f"the same distribution ({len(self.tests)} tests, smallest p {self.smallest:.2g})"
        what = "temperature is ignored after the first token" if self.ignores_temperature else "another distribution"
        return head + f"{what} (smallest p {self.smallest:.2g})"


def sampled_match(reference: Sequence[Samples], found: Sequence[Samples], temperature: float) -> SamplingMatch:
    """Compare two servers' samples, prefix by prefix: each position alone, then the whole continuation."""
    views = {f"token {i + 1}": slice(i, i + 1) for i in range(SAMPLED)} | {"all tokens": slice(None)}
    tests = {}
    for prefix, sides in enumerate(zip(reference, found, strict=True)):
        for what, part in views.items():
            p = same_distribution_p(*([sample[part] for sample in side] for side in sides))
            if p is not None:
                tests[f"prefix {prefix}, {what}"] = p
    ignores = any(map(_varies_later, reference)) and not any(map(_varies_later, found))
    adjusted = {what: min(1.0, len(tests) * p) for what, p in tests.items()}
    return SamplingMatch(adjusted, len(reference[0]) if reference else 0, temperature, ignores)


def _varies_later(samples: Samples) -> bool:
    """True if texts with the same first token continue differently."""
    kinds = {sample for sample in samples if sample}
    return len(kinds) > len({sample[0] for sample in kinds})
