"""What was measured beside what is published, and what a difference means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..bench import published
from ..bench.runs import Cell, Groups, Run
from ..bench.statistics import METRICS, Interval, Metric

_MI355X = "gfx950"
_MI355X_LENGTHS = ("random", 1024, 1024, 0.8, True)  # of the published sweep: dataset, input, output, shortest, chat


@dataclass(frozen=True)
class Comparison:
    """One measured figure beside the published one. difference: measured / published - 1."""

    workload: str
    side: str
    metric: Metric
    published: float
    measured: Interval
    difference: float
    verdict: str


@dataclass(frozen=True)
class PerGpu:
    """Output tokens a second and GPU: the median over the measurements of one concurrency."""

    workload: str
    side: str
    concurrency: int
    gpus: int
    measured: float
    published: float | None
    difference: float | None
    verdict: str


def compare(groups: Groups) -> list[Comparison]:
    """Every measured figure that has a published counterpart, with a verdict in words."""
    return [each for sides in groups.values() for cell in sides.values() for each in _compare(cell)]


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


def compare_per_gpu(groups: Groups) -> list[PerGpu]:
    """One row for each workload, concurrency and side whose number of GPUs is recorded."""
    return [row for sides in groups.values() for cell in sides.values() if (row := _per_gpu(cell)) is not None]


def _per_gpu(cell: Cell) -> PerGpu | None:
    counts = {each.gpus for each in cell.measurements}
    gpus = counts.pop() if len(counts) == 1 else None
    if not gpus:
        return None
    work = cell.workload
    measured = float(np.median([each.load.output_throughput for each in cell.measurements])) / gpus
    value, verdict = None, "no published figure for this"
    lengths = (work.dataset, work.input_len, work.output_len, work.range_ratio, work.chat_template)
    if lengths == _MI355X_LENGTHS:
        value = published.per_gpu(cell.side).get(cell.concurrency)
    if value is not None:
        verdict = why_not_comparable(cell.run, gpus, _MI355X, "not MI355X") or ""
    difference = None if value is None else measured / value - 1
    return PerGpu(work.name, cell.side, cell.concurrency, gpus, measured, value, difference, verdict)


def why_not_comparable(run: Run, gpus: int, arch: str, instead: str) -> str | None:
    """One sentence when the server's GPUs are not known to be `gpus` or more of `arch`, else None."""
    hardware = run.record.get("hardware") or {}
    if not hardware.get("known", True):
        return "not comparable: the server runs on another machine, whose GPUs are not known here"
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
        return f"means little: the published baseline itself moved by {usual:.1%} between two days"
    better = (difference > 0) == metric.higher_is_better
    beyond = f", more than the {usual:.1%} between two published days" if usual is not None else ""
    return f"{'better' if better else 'worse'} by {abs(difference):.1%}{beyond}"
