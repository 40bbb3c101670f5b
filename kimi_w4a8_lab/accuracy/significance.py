"""Statistics of the verdicts: intervals of an accuracy, paired and unpaired comparison, samples of tokens.

scipy comes with lm-eval. It is imported where it is used, so that `kimi-w4a8 --help` works without it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
ALPHA = 0.05
# Accepted loss against a reported accuracy. On 1,319 problems a server whose accuracy is the reported 93.6 % passes
# with 97 %, and one that lost 3 points with 2 %.
REPORTED_MARGIN = 0.03
_SMALLEST_EXPECTED = 5.0  # expected count of a category; rarer ones are pooled


@dataclass(frozen=True)
class ShareInterval:
    """A share with its confidence limits, all in 0..1."""

    value: float
    low: float
    high: float

    def __format__(self, sign: str) -> str:
        """Format a share as `93.63% [92.20%, 94.80%]`, a difference (`+`) as `-0.20 [-1.10, +0.70] points`."""
        if not sign:
            return f"{self.value:.2%} [{self.low:.2%}, {self.high:.2%}]"
        return f"{100 * self.value:+.2f} [{100 * self.low:+.2f}, {100 * self.high:+.2f}] points"

    def __str__(self) -> str:
        return format(self, "")


def wilson(correct: int, n: int, confidence: float = 0.95) -> ShareInterval:
    """Wilson score interval of `correct` out of `n`, which stays correct near 0 and 1."""
    if not 0 <= correct <= n or n == 0:
        raise ValueError(f"{correct} of {n} is not a share")
    z = _NORMAL.inv_cdf(0.5 + confidence / 2)
    p = correct / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return ShareInterval(p, max(0.0, centre - half), min(1.0, centre + half))


def more_often_p(events: int, of: int, expected: int, of_expected: int) -> float:
    """Fisher's one-sided test of whether events are more frequent here than where they are expected."""
    from scipy.stats import fisher_exact  # optional: scipy, a second

    table = [[events, of - events], [expected, of_expected - expected]]
    return float(fisher_exact(table, alternative="greater").pvalue)


def mcnemar_p(only_first: int, only_second: int, alternative: str = "two-sided") -> float:
    """Exact McNemar test of whether the pairs in which only one side has a property split evenly."""
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    from scipy.stats import binomtest  # optional: scipy, a second

    return float(binomtest(only_first, discordant, alternative=alternative).pvalue)


def paired_z(only_new: int, only_base: int, n: int, difference: float) -> float:
    """Score statistic (Tango 1998) of the hypothesis that accuracy(new) - accuracy(base) equals `difference`.

    only_new, only_base: problems, of `n`, solved by only one side. With difference 0 this is McNemar's statistic. It is
    positive when the data lie above the hypothesis.
    """
    b, c, d = only_new, only_base, difference
    linear = -b - c + (2 * n - b + c) * d
    discriminant = linear * linear + 8 * n * c * d * (1 - d)
    share = (math.sqrt(max(0.0, discriminant)) - linear) / (4 * n)
    variance = n * (2 * share + d * (1 - d))
    excess = b - c - n * d
    if variance <= 0:
        return 0.0 if excess == 0 else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


def paired_interval(only_new: int, only_base: int, n: int, confidence: float = 0.90) -> ShareInterval:
    """Score interval of accuracy(new) - accuracy(base); its lower limit at 90 % is the 5 % non-inferiority test."""
    z = _NORMAL.inv_cdf(0.5 + confidence / 2)
    value = (only_new - only_base) / n

    from scipy.optimize import bisect  # optional: scipy

    def limit(outer: float, target: float) -> float:
        if value == outer:
            return value
        return float(bisect(lambda d: paired_z(only_new, only_base, n, d) - target, value, outer, xtol=1e-12))

    return ShareInterval(value, limit(-1.0, z), limit(1.0, -z))


def share_difference(correct: int, n: int, other: int, other_n: int, confidence: float = 0.90) -> ShareInterval:
    """Interval of the difference of two independent shares, first minus second (Newcombe 1998, from Wilson's limits).

    Its lower limit at 90 % is the 5 % test of non-inferiority.
    """
    first, second = wilson(correct, n, confidence), wilson(other, other_n, confidence)
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return ShareInterval(value, value - below, value + above)


def noninferiority_power(n: int, discordance: float, margin: float, alpha: float = ALPHA) -> float:
    """Probability to prove non-inferiority of two equally good sides, by enumeration of all outcomes.

    n: problems answered by both. discordance: share of problems that exactly one side solves.
    """
    from scipy.stats import binom  # optional: scipy

    critical = _NORMAL.inv_cdf(1 - alpha)
    first, last = binom.interval(1 - 1e-9, n, discordance)
    differ = range(int(first), int(last) + 1)
    # The statistic grows with the problems that only the new side solves. Find the least count that passes, or d + 1.
    least = [bisect_left(range(d + 1), critical, key=lambda new: paired_z(new, d - new, n, -margin)) for d in differ]
    return float(binom.pmf(differ, n, discordance) @ binom.sf(least, differ, 0.5, loc=1))


def problems_needed(discordance: float, margin: float, power: float = 0.8) -> int:
    """Approximate number of problems that prove non-inferiority of two equally good sides with this power."""

    def reached(n: int) -> float:
        return noninferiority_power(n, discordance, margin)

    enough = 1
    while reached(enough) < power:
        enough *= 2
    return bisect_left(range(enough), power, lo=enough // 2 + 1, key=reached)


def same_distribution_p(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Chi-squared two-sample test over categories, rare ones pooled; None if only one category is left to test."""
    a, b = Counter(first), Counter(second)
    share = min(len(first), len(second)) / (len(first) + len(second))
    cells: list[tuple[int, int]] = []
    rest = [0, 0]
    for value in a.keys() | b.keys():
        if (a[value] + b[value]) * share >= _SMALLEST_EXPECTED:
            cells.append((a[value], b[value]))
        else:
            rest = [rest[0] + a[value], rest[1] + b[value]]
    if sum(rest):
        cells.append((rest[0], rest[1]))
    if len(cells) < 2:
        return None
    from scipy.stats import chi2_contingency  # optional: scipy, a second

    return float(chi2_contingency(cells, correction=False).pvalue)
