"""Figures that others report for this stack, with sources, from `bench/published/*.json`.

This package measured none of them. Published points have no spread; the only yardstick is that two articles report the
same configuration on two days (`day_to_day`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from kimi_w4a8_eagle3.base.installed import operator_dir

MAIN, _EARLIER = "mi325x-eagle3", "mi325x-w4a16-w4a8-w8a8"
BASELINE = "w4a8"

Points = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class AcceptLength:
    """Accept length of one kind of text. mark: short name for a crowded plot."""

    text: str
    kind: Literal["repeated", "real"]
    accept_length: float
    source: str
    mark: str | None = None


@cache
def load(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((operator_dir("bench") / "published" / f"{name}.json").read_text())
    return content


def points() -> Points:
    """Return {"con2": {"w4a8": {"tpot_median_ms": ...}, ...}, ...} of the article that this package reproduces."""
    found: Points = load(MAIN)["points"]
    return found


def reported(recipe: str, point: str) -> tuple[Mapping[str, float], str]:
    """Return a recipe's figures at `con2` or `con40` and their source from the latest article with any, or ({}, "")."""
    for name in (MAIN, _EARLIER):
        article = load(name)
        if figures := article["points"].get(point, {}).get(recipe):
            return figures, f"{article['source']}; {article['hardware']}"
    return {}, ""


def accept_lengths() -> list[AcceptLength]:
    """Return the accept lengths of the published points, whose text repeats itself, and of text written by people."""
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
    """Return one configuration's relative difference between the articles; unknown metrics take the point's largest."""
    later = points().get(point, {}).get(BASELINE, {})
    earlier = load(_EARLIER)["points"].get(point, {}).get(BASELINE, {})
    found = {key: abs(earlier[key] / later[key] - 1) for key in later if key in earlier}
    return found.get(metric, max(found.values(), default=None))
