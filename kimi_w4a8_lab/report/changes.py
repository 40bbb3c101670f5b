"""Comparison of two sides: the ratio of every figure, with a bootstrap interval."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kimi_w4a8_eagle3.base.errors import KimiError

from ..speed.runs import Cell, Groups
from ..speed.statistics import METRICS, Interval, Metric, ratio

_LOST_TO_DRAFTS = 2  # prompt tokens, see `require_hits`


class Direction(str, Enum):
    """Result of a comparison, in words."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference shown"
    UNKNOWN = "too few repetitions (--repeats 3)"


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
    def direction(self) -> Direction:
        if self.change.low is None:
            return Direction.UNKNOWN
        if self.change.covers(1.0):
            return Direction.SAME
        return Direction.BETTER if (self.change.value > 1) == self.metric.higher_is_better else Direction.WORSE

    @property
    def speedup(self) -> Interval:
        """Factor by which b is better than a; below 1 it is worse."""
        value, low, high = self.change.value, self.change.low, self.change.high
        if self.metric.higher_is_better:
            return self.change
        return Interval(1 / value, 1 / high if high else None, 1 / low if low else None)


def compare_sides(groups: Groups, base: str | None = None) -> list[Row]:
    """Compare, for every workload measured on several sides, each other side with the first (or `base`)."""
    rows = []
    for (workload, concurrency), sides in groups.items():
        names = list(sides)
        first = base if base is not None and base in sides else names[0]
        for name in (name for name in names if name != first):
            for key, metric in METRICS.items():
                values = sides[first].figures[key], sides[name].figures[key]
                change = ratio(sides[first].repetitions, sides[name].repetitions, metric)
                rows.append(Row(workload, concurrency, first, name, metric, *values, change))
    return rows


def require_hits(groups: Groups) -> None:
    """Raise KimiError if speculation lowers the hit rate of the prefix cache (sglang#32459 lost half of the hits).

    Two prompt tokens may be computed again. EAGLE's keys are pairs of neighbouring tokens, one fewer than there are
    tokens. And if the target drew an answer's last token after drafts, its KV is not computed yet, while without drafts
    the next step has already computed it. In the first turn, chance decides which user brings the shared prompt.
    """
    for (workload, concurrency), sides in groups.items():
        cells = [cell for cell in sides.values() if cell.measurements[0].turns]
        computed = {cell.side: _computed_again(cell) for cell in cells}
        plain = [computed[cell.side] for cell in cells if cell.measurements[0].acceptance is None]
        for cell in cells:
            if plain and computed[cell.side] > min(plain) + _LOST_TO_DRAFTS:
                raise KimiError(
                    f"speculation lowers the hit rate of the prefix cache: with {cell.side} {computed[cell.side]:,.1f} "
                    f"tokens of a prompt are computed, without speculation {min(plain):,.1f}",
                    where=f"{workload}, concurrency {concurrency}, from the second turn on",
                    expected=f"at most {_LOST_TO_DRAFTS} tokens more, the cost of drafts",
                    remedy="check on /metrics (evicted, retracted) that the KV pool holds all conversations",
                )


def _computed_again(cell: Cell) -> float:
    """Return the prompt tokens per request after the first turn that the cache did not have."""
    later = [turn for measurement in cell.measurements for turn in measurement.turns[1:]]
    return float(np.mean([turn.prompt_tokens - turn.cached_tokens for turn in later]))
