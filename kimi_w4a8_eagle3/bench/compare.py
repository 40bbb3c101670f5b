"""Two sides of a measurement against each other: the ratio of every figure, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .runs import Run, grouped, repetitions
from .statistics import METRICS, Interval, Metric, estimate, ratio

# What the article calls the env-only delta: the two kernel gates, and nothing else, between these recipes.
ENV_ONLY = ("eagle3", "eagle3-opt")


@dataclass(frozen=True)
class Row:
    """One figure of two sides; `change` is b / a."""

    workload: str
    concurrency: int
    a: str
    b: str
    metric: Metric
    value_a: Interval
    value_b: Interval
    change: Interval

    @property
    def verdict(self) -> str:
        """In words: better, worse, or not told apart by these runs."""
        if self.change.low is None:
            return "too few repetitions to tell"
        if self.change.covers(1.0):
            return "no difference can be told"
        return "better" if (self.change.value > 1) == self.metric.higher_is_better else "worse"

    @property
    def env_only(self) -> bool:
        """True for the published env-only comparison, eagle3 against eagle3-opt."""
        return (self.a, self.b) == ENV_ONLY


def compare_sides(runs: Sequence[Run], base: str | None = None) -> list[Row]:
    """Every workload measured on several sides: each other side against the first (or `base`).

    eagle3 and eagle3-opt are also compared with each other when a third side is the base.
    """
    rows = []
    for (workload, concurrency), sides in grouped(runs).items():
        names = list(sides)
        first = base if base in sides else names[0]
        pairs = [(first, name) for name in names if name != first]
        if set(ENV_ONLY) <= set(names) and ENV_ONLY not in pairs:
            pairs.append(ENV_ONLY)
        for a, b in pairs:
            reps_a, reps_b = repetitions(sides[a]), repetitions(sides[b])
            for metric in METRICS.values():
                values = estimate(reps_a, metric), estimate(reps_b, metric)
                rows.append(Row(workload, concurrency, a, b, metric, *values, ratio(reps_a, reps_b, metric)))
    return rows
