"""Comparison of two sides: the ratio of every figure, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..base.errors import KimiError
from ..bench.runs import Cell, Groups
from ..bench.statistics import METRICS, Interval, Metric, ratio

_LOST_TO_DRAFTS = 2  # prompt tokens, see `require_hits`


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
        """Verdict in words: better, worse, or no difference."""
        if self.change.low is None:
            return "too few repetitions to tell"
        if self.change.covers(1.0):
            return "no significant difference"
        return "better" if (self.change.value > 1) == self.metric.higher_is_better else "worse"


@dataclass(frozen=True)
class Summary:
    """One sentence on two sides of a workload; `direction` is better, worse or empty."""

    text: str
    direction: str


def verdicts(rows: Sequence[Row], groups: Groups) -> list[Summary]:
    """Return a summary for each workload, concurrency and pair of sides: TPOT, and the accept length behind it."""
    found = []
    for row in (row for row in rows if row.metric.key == "tpot_median_ms"):
        length = groups[row.workload, row.concurrency][row.b].accept_length
        pair = "EAGLE3" if row.a == f"{row.b}:plain" else f"{row.b} against {row.a}"
        where = f"on {row.workload} at concurrency {row.concurrency}"
        faster = row.change.value < 1
        factor = 1 / row.change.value if faster else row.change.value
        known = row.verdict in ("better", "worse")
        change = f"{factor:.2f}x {'faster' if faster else 'slower'} {where}"
        text = f"{pair} is {change}" if known else f"{pair}: {row.verdict} {where}"
        tokens = "" if length is None else f", {length:.2f} tokens per verify step"
        unit = f"TPOT {row.value_a.value:.1f} to {row.value_b.value:.1f} ms"
        found.append(Summary(f"{text} ({unit}{tokens}).", row.verdict if known else ""))
    return found


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
