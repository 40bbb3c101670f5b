"""Comparison of the distributions from which two servers draw sampled continuations.

With speculation the first new token comes from prefill and only later ones from verify steps. A few tokens are
therefore drawn after each fixed prefix, and each position is tested alone and all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import significance

LENGTH = 4
ALPHA = 0.001  # one false alarm in a thousand checks; an ignored temperature gives p = 1e-20
Samples = list[tuple[int, ...]]


@dataclass(frozen=True)
class Test:
    """One two-sample test. kinds: distinct outcomes from the reference and from the other server."""

    prefix: int
    what: str
    p: float
    adjusted_p: float
    kinds: tuple[int, int]


@dataclass(frozen=True)
class SamplingMatch:
    """All tests. `ignores_temperature`: the reference varies after the first token and the other server never does."""

    tests: list[Test]
    samples: int
    temperature: float
    ignores_temperature: bool

    @property
    def differs(self) -> bool:
        """True if a test rejects after Holm's adjustment."""
        return any(test.adjusted_p < ALPHA for test in self.tests)

    @property
    def conclusive(self) -> bool:
        """True if the samples varied; without variation there is no distribution to compare."""
        return bool(self.tests)


def compare(reference: Sequence[Samples], found: Sequence[Samples], temperature: float) -> SamplingMatch:
    """Compare two servers' samples, prefix by prefix (chi-squared, Holm over all tests)."""
    raw: list[tuple[int, str, float, tuple[int, int]]] = []
    for prefix, (ours, theirs) in enumerate(zip(reference, found, strict=True)):
        for what, a, b in _views(ours, theirs):
            p = significance.same_distribution_p(a, b)
            if p is not None:
                raw.append((prefix, what, p, (len(set(a)), len(set(b)))))
    adjusted = significance.holm([p for _, _, p, _ in raw])
    tests = [Test(prefix, what, p, q, kinds) for (prefix, what, p, kinds), q in zip(raw, adjusted, strict=True)]
    varies = any(_varies_later(samples) for samples in reference)
    return SamplingMatch(
        tests=tests,
        samples=len(reference[0]) if reference else 0,
        temperature=temperature,
        ignores_temperature=varies and not any(_varies_later(samples) for samples in found),
    )


def _views(a: Samples, b: Samples) -> list[tuple[str, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """Return each position alone (an ended text is its own outcome), then the whole continuation."""
    views = [(f"token {i + 1}", [s[i : i + 1] for s in a], [s[i : i + 1] for s in b]) for i in range(LENGTH)]
    return [*views, (f"{LENGTH} tokens together", list(a), list(b))]


def _varies_later(samples: Samples) -> bool:
    """True if texts with the same first token continue differently."""
    continuations: dict[int, set[tuple[int, ...]]] = {}
    for sample in samples:
        if sample:
            continuations.setdefault(sample[0], set()).add(sample[1:])
    return any(len(found) > 1 for found in continuations.values())
