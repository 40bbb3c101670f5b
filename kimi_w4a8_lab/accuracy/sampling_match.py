"""Comparison of the distributions from which two servers draw sampled continuations.

With speculation the first new token comes from prefill and only later ones from verify steps. A few tokens are
therefore drawn after each fixed prefix, and each position is tested alone and all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import significance

LENGTH = 4
ALPHA = 0.001  # one false alarm in a thousand checks; an ignored temperature gives p = 1e-20
Samples = list[tuple[int, ...]]


@dataclass(frozen=True)
class Test:
    """One two-sample test. adjusted_p: after Bonferroni's adjustment. kinds: distinct outcomes, reference and other."""

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
        """True if a test rejects after the adjustment."""
        return any(test.adjusted_p < ALPHA for test in self.tests)

    @property
    def smallest(self) -> float:
        """Smallest adjusted p; 1 when the samples did not vary."""
        return min((test.adjusted_p for test in self.tests), default=1.0)

    def __str__(self) -> str:
        head = f"sampling at temperature {self.temperature:g}, {self.samples} continuations a prefix: "
        if not self.tests:
            return head + "the samples did not vary, so there was nothing to compare"
        if not self.differs:
            return head + f"the same distribution ({len(self.tests)} tests, smallest p {self.smallest:.2g})"
        what = "temperature is ignored after the first token" if self.ignores_temperature else "another distribution"
        return head + f"{what} (smallest p {self.smallest:.2g})"


def compare(reference: Sequence[Samples], found: Sequence[Samples], temperature: float) -> SamplingMatch:
    """Compare two servers' samples, prefix by prefix: chi-squared, adjusted for the number of tests."""
    tests = []
    for prefix, (ours, theirs) in enumerate(zip(reference, found, strict=True)):
        for what, a, b in _views(ours, theirs):
            p = significance.same_distribution_p(a, b)
            if p is not None:
                tests.append(Test(prefix, what, p, p, (len(set(a)), len(set(b)))))
    tests = [replace(test, adjusted_p=min(1.0, len(tests) * test.p)) for test in tests]
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
