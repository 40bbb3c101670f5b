"""Comparison of measured with published figures, and its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from ..speed import published
from ..speed.runs import Cell, Run
from ..speed.statistics import METRICS, Interval, Metric
from .changes import Direction


@dataclass(frozen=True)
class Comparison:
    """Published figure of a measured one, and the meaning of the difference."""

    published: float
    direction: Direction
    meaning: str


def compare(cell: Cell) -> dict[str, Comparison]:
    """Return the published counterparts of a cell's figures by metric."""
    reference = cell.workload.reference or ""
    reported = published.points().get(reference, {}).get(cell.side, {})
    why_not = _why_not_comparable(cell.run)
    return {
        key: Comparison(value, Direction.UNKNOWN, why_not)
        if why_not
        else _compared(reference, METRICS[key], value, cell.figures[key])
        for key, value in reported.items()
        if key in METRICS
    }


def _why_not_comparable(run: Run) -> str | None:
    """Return a sentence if the server's GPUs are not known to be those of the article or more, else None."""
    hardware, main = run.record.get("hardware") or {}, published.load(published.MAIN)
    if not hardware.get("known", True):
        return "not comparable: the server runs on another machine with unknown GPUs"
    found = hardware.get("gpus") or []
    if len(found) < main["gpus"] or set(found) != {main["arch"]}:
        here = f"{len(found)} x {', '.join(sorted(set(found)))}" if found else "no AMD GPU"
        return f"not comparable: measured with {here}, published on {main['hardware']}"
    return None


def _compared(point: str, metric: Metric, value: float, measured: Interval) -> Comparison:
    difference = measured.value / value - 1
    usual = published.day_to_day(point, metric.key)
    if measured.covers(value):
        return Comparison(value, Direction.SAME, "no difference: the published value is in the measured 95% interval")
    if usual is not None and abs(difference) <= usual:
        meaning = f"not significant: the published baseline itself moved by {usual:.1%} between two days"
        return Comparison(value, Direction.SAME, meaning)
    direction = Direction.BETTER if (difference > 0) == metric.higher_is_better else Direction.WORSE
    beyond = f", more than the {usual:.1%} between two published days" if usual is not None else ""
    return Comparison(value, direction, f"{direction.value} by {abs(difference):.1%}{beyond}")
