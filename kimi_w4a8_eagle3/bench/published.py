"""Figures that others report for this stack, each with its source: `bench/published/*.json`, the one place for them.

Nothing here was measured by this package. Published points carry no spread; the one yardstick for it is that two
articles give the same configuration on two days (`day_to_day`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ..base.resources import operator_dir

MAIN, _EARLIER = "mi325x-eagle3", "mi325x-w4a16-w4a8-w8a8"
BASELINE = "w4a8"

Points = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class AcceptLength:
    """How well some text is drafted. mark: its short name where a plot has room for few."""

    text: str
    kind: Literal["repeated", "real"]
    accept_length: float
    source: str
    mark: str | None = None


@cache
def load(name: str) -> Mapping[str, Any]:
    """`bench/published/<name>.json`."""
    content: Mapping[str, Any] = json.loads((operator_dir("bench") / "published" / f"{name}.json").read_text())
    return content


def points() -> Points:
    """{"con2": {"w4a8": {"tpot_median_ms": ...}, ...}, ...} of the article that this package reproduces."""
    found: Points = load(MAIN)["points"]
    return found


def reported(recipe: str, point: str) -> tuple[Mapping[str, float], str]:
    """A recipe's figures at `con2` or `con40` and their source: the later article that has any; ({}, "") without."""
    for name in (MAIN, _EARLIER):
        article = load(name)
        if figures := article["points"].get(point, {}).get(recipe):
            return figures, f"{article['source']}; {article['hardware']}"
    return {}, ""


def accept_lengths() -> list[AcceptLength]:
    """Of the text behind the published points, which repeats itself, and of text that people write."""
    repeated = [
        AcceptLength(
            f"random 10240/512 at {point}",
            "repeated",
            figures["accept_length"],
            load(MAIN)["source"],
            "random (repeated)" if point == "con40" else None,
        )
        for point, sides in points().items()
        for figures in sides.values()
        if "accept_length" in figures
    ]
    return repeated + [AcceptLength(kind="real", **row) for row in load("acceptance")["real"]]


def day_to_day(point: str, metric: str) -> float | None:
    """Relative difference of one configuration between the two articles; of the point's worst metric if not given."""
    later = points().get(point, {}).get(BASELINE, {})
    earlier = load(_EARLIER)["points"].get(point, {}).get(BASELINE, {})
    found = {key: abs(earlier[key] / later[key] - 1) for key in later if key in earlier}
    return found.get(metric, max(found.values(), default=None))
