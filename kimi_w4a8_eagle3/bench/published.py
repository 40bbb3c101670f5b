"""Published figures of this stack, and what a difference from them means.

They come from `bench/published/*.json`, each with its source. Published points carry no spread; the one yardstick for
it is that two articles give the same configuration on two days (`day_to_day`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..resources import operator_dir
from .runs import Run, grouped, repetitions
from .statistics import METRICS, Interval, Metric, estimate

_MAIN, _EARLIER = "mi325x-eagle3", "mi325x-w4a16-w4a8-w8a8"
_SAME_CONFIGURATION = "w4a8"
BASELINE = "w4a8"


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


@cache
def load(name: str) -> Mapping[str, Any]:
    """`bench/published/<name>.json`."""
    content: Mapping[str, Any] = json.loads((operator_dir("bench") / "published" / f"{name}.json").read_text())
    return content


def points() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """{"con2": {"w4a8": {"tpot_median_ms": ...}, ...}, ...} of the article that this package reproduces."""
    found: Mapping[str, Mapping[str, Mapping[str, float]]] = load(_MAIN)["points"]
    return found


def day_to_day(point: str, metric: str) -> float | None:
    """Relative difference of one configuration between the two articles; of the point's worst metric if not given."""
    later = points().get(point, {}).get(_SAME_CONFIGURATION, {})
    earlier = load(_EARLIER)["points"].get(point, {}).get(_SAME_CONFIGURATION, {})
    found = {key: abs(earlier[key] / later[key] - 1) for key in later if key in earlier}
    return found.get(metric, max(found.values(), default=None))


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Every measured figure that has a published counterpart, with a verdict in words."""
    found = []
    for (workload, _), sides in grouped(runs).items():
        for side, pairs in sides.items():
            reference = pairs[0][1].workload.reference
            published = points().get(reference or "", {}).get(side, {})
            for key, value in published.items():
                if key in METRICS and reference is not None:
                    measured = estimate(repetitions(pairs), METRICS[key])
                    why_not = why_not_comparable(pairs[0][0])
                    verdict = why_not or _verdict(reference, METRICS[key], value, measured)
                    difference = measured.value / value - 1
                    found.append(Comparison(workload, side, METRICS[key], value, measured, difference, verdict))
    return found


def why_not_comparable(run: Run) -> str | None:
    """One sentence when the run's machine is not the published one, else None."""
    main = load(_MAIN)
    hardware = run.record.get("hardware") or {}
    if not hardware.get("known", True):
        return "not comparable: the server runs on another machine, whose GPUs are not known here"
    gpus = hardware.get("gpus") or []
    if len(gpus) < main["gpus"] or set(gpus) != {main["arch"]}:
        here = f"{len(gpus)} x {', '.join(sorted(set(gpus)))}" if gpus else "no AMD GPU"
        return f"not comparable: measured with {here}, published on {main['hardware']}"
    return None


def _verdict(point: str, metric: Metric, published: float, measured: Interval) -> str:
    difference = measured.value / published - 1
    usual = day_to_day(point, metric.key)
    if measured.covers(published):
        return "no difference: the published value lies inside the measured 95% interval"
    if usual is not None and abs(difference) <= usual:
        return f"means little: the published baseline itself moved by {usual:.1%} between two days"
    better = (difference > 0) == metric.higher_is_better
    beyond = f", more than the {usual:.1%} between two published days" if usual is not None else ""
    return f"{'better' if better else 'worse'} by {abs(difference):.1%}{beyond}"
