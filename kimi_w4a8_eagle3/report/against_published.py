"""Comparison of measured with published figures, and its meaning."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench import published
from ..bench.runs import Cell, Groups, Run
from ..bench.statistics import METRICS, Interval, Metric


@dataclass(frozen=True)
class Comparison:
    """Measured figure beside the published one. difference: measured / published - 1."""

    workload: str
    side: str
    metric: Metric
    published: float
    measured: Interval
    difference: float
    verdict: str


def compare(groups: Groups) -> list[Comparison]:
    """Return every measured figure that has a published counterpart, with a verdict in words."""
    return [comparison for sides in groups.values() for cell in sides.values() for comparison in _compare(cell)]


def _compare(cell: Cell) -> list[Comparison]:
    reference, main, found = cell.workload.reference, published.load(published.MAIN), []
    for key, value in published.points().get(reference or "", {}).get(cell.side, {}).items():
        if key in METRICS and reference is not None:
            metric, measured = METRICS[key], cell.figures[key]
            why_not = why_not_comparable(cell.run, main["gpus"], main["arch"], f"published on {main['hardware']}")
            verdict = why_not or _verdict(reference, metric, value, measured)
            difference = measured.value / value - 1
            found.append(Comparison(cell.workload.name, cell.side, metric, value, measured, difference, verdict))
    return found


def why_not_comparable(run: Run, gpus: int, arch: str, instead: str) -> str | None:
    """Return a sentence if the server's GPUs are not known to be `gpus` or more of `arch`, else None."""
    hardware = run.record.get("hardware") or {}
    if not hardware.get("known", True):
        return "not comparable: the server runs on another machine with unknown GPUs"
    found = hardware.get("gpus") or []
    if len(found) < gpus or set(found) != {arch}:
        here = f"{len(found)} x {', '.join(sorted(set(found)))}" if found else "no AMD GPU"
        return f"not comparable: measured with {here}, {instead}"
    return None


def _verdict(point: str, metric: Metric, value: float, measured: Interval) -> str:
    difference = measured.value / value - 1
    usual = published.day_to_day(point, metric.key)
    if measured.covers(value):
        return "no difference: the published value lies inside the measured 95% interval"
    if usual is not None and abs(difference) <= usual:
        return f"not significant: the published baseline itself moved by {usual:.1%} between two days"
    better = (difference > 0) == metric.higher_is_better
    beyond = f", more than the {usual:.1%} between two published days" if usual is not None else ""
    return f"{'better' if better else 'worse'} by {abs(difference):.1%}{beyond}"
