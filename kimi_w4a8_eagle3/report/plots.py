"""The report's figures, drawn with matplotlib; each function returns a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..bench import published
from ..bench.runs import Groups
from ..bench.statistics import METRICS, Interval
from .speedup import Speedup

# Grey, blue and green for the three configurations of the article; further sides take the next colours.
_ARTICLE = {"w4a8": "#8c8c8c", "eagle3": "#2f6db5", "eagle3-opt": "#3a9a5b"}
COLOURS = ["#2f6db5", "#c8772e", "#7b5ea7", "#3a9a5b", "#b5485a", "#4aa3a3"]
_PANELS = (
    "tpot_median_ms",
    "output_throughput_tok_s",
    "tpot_p99_ms",
    "itl_median_ms",
    "ttft_median_ms",
)
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Bar:
    """One bar: group on the x axis, side, published or measured, and value."""

    group: str
    side: str
    published: bool
    value: Interval


Bars = Mapping[str, Sequence[Bar]]  # metric key (or accept_length) -> bars


def colour(side: str, sides: Sequence[str]) -> str:
    """Return a side's colour: grey for plain sides, the article's for its configurations, else the next free one."""
    if side in _ARTICLE:
        return _ARTICLE[side]
    if side.endswith(":plain"):
        return "#8c8c8c"
    others = [name for name in sides if name not in _ARTICLE and not name.endswith(":plain")]
    return COLOURS[others.index(side) % len(COLOURS)]


def measured_bars(groups: Groups, reproducing: bool) -> dict[str, list[Bar]]:
    """Make the bars of workloads that reproduce a published point, or of all others."""
    bars: dict[str, list[Bar]] = {}
    for (workload, concurrency), sides in groups.items():
        for side, cell in sides.items():
            work = cell.workload
            if (work.reference is not None) != reproducing:
                continue
            group = work.reference or (workload if len(work.concurrency) == 1 else f"{workload} c={concurrency}")
            for key in _PANELS:
                bars.setdefault(key, []).append(Bar(group, side, False, cell.figures[key]))
            if cell.accept_length is not None:
                value = Interval(cell.accept_length, None, None)
                bars.setdefault("accept_length", []).append(Bar(group, side, False, value))
    return bars


def published_bars() -> dict[str, list[Bar]]:
    """Make the bars of the article's points."""
    bars: dict[str, list[Bar]] = {}
    for point, sides in published.points().items():
        for side, values in sides.items():
            for key, value in values.items():
                bars.setdefault(key, []).append(Bar(point, side, True, Interval(value, None, None)))
    return bars


def ordered_sides(bars: Bars) -> list[str]:
    """Return the sides of all bars: the article's in its order, then plain ones, then the others."""
    known = list(_ARTICLE)
    return sorted(
        dict.fromkeys(bar.side for group in bars.values() for bar in group),
        key=lambda side: known.index(side) if side in known else len(known) * (not side.endswith(":plain")),
    )


def panels(bars: Bars) -> Iterator[tuple[str, str, Figure]]:
    """Yield (key, description, figure) for TPOT, throughput, TPOT P99, ITL, TTFT and accept length.

    Published bars are hatched, measured ones solid. A logarithmic axis has dots, because a bar has no length there.
    """
    sides = ordered_sides(bars)
    for key in (*_PANELS, "accept_length"):
        if not bars.get(key):
            continue
        metric = METRICS.get(key)
        name = f"{metric.title} ({metric.unit})" if metric else "accept length (tokens per verify step)"
        values = [
            f"{bar.group} {bar.side}{' published' * bar.published} {_short(bar.value.value)}" for bar in bars[key]
        ]
        with plt.rc_context(STYLE):
            figure, axis = plt.subplots(figsize=(4.4, 3))
            axis.set_title(name, loc="left")
            _panel(axis, bars[key], sides, log=key == "ttft_median_ms")
        yield key, f"{name}: {'; '.join(values)}", figure


def _panel(axis: Axes, bars: Sequence[Bar], sides: Sequence[str], log: bool) -> None:
    groups = list(dict.fromkeys(bar.group for bar in bars))
    rank = {bar: (sides.index(bar.side), not bar.published) for bar in bars}
    width = min(0.28, 0.8 / max(sum(bar.group == group for bar in bars) for group in groups))
    top = max(bar.value.high or bar.value.value for bar in bars)
    for bar in bars:
        beside = sorted((other for other in bars if other.group == bar.group), key=rank.__getitem__)
        x = groups.index(bar.group) + (beside.index(bar) - (len(beside) - 1) / 2) * width
        shade = colour(bar.side, sides)
        if log:
            axis.plot(x, bar.value.value, "o", color=shade, fillstyle="none" if bar.published else "full")
        else:
            look: dict[str, Any] = {"edgecolor": shade, "hatch": "////"} if bar.published else {}
            axis.bar(x, bar.value.value, width * 0.92, **{"facecolor": "white" if bar.published else shade, **look})
        if bar.value.low is not None and bar.value.high is not None:
            axis.plot([x, x], [bar.value.low, bar.value.high], color="#222222", linewidth=1)
        height = max(bar.value.value, bar.value.high or 0)
        axis.annotate(
            _short(bar.value.value),
            (x, height),
            (0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
        )
    if log:
        axis.set_yscale("log")
        axis.set_ylim(min(bar.value.value for bar in bars) / 2, top * 3)
    else:
        axis.set_ylim(0, top * 1.18)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.grid(axis="y", color="#e5e5e5")


def speedup_curves(curves: Sequence[Speedup], marks: Mapping[str, float]) -> Figure:
    """Plot the TPOT speed-up over the accept length, with measurements, the break-even line and known texts."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8.5, 4.6))
        ceiling = 4.0  # accept length with four draft tokens
        lengths = np.linspace(1, ceiling, 200)
        for i, curve in enumerate(curves):
            shade = COLOURS[i % len(COLOURS)]
            style = "-" if curve.measured_here else "--"
            even = f"even at {curve.break_even:.2f}" if curve.break_even <= ceiling else "never even"
            label = f"{curve.title} ({even})"
            axis.plot(lengths, [curve.at(length) for length in lengths], style, color=shade, label=label)
            axis.plot(curve.accept_length, curve.measured, "o", color=shade)
        axis.axhline(1, color="#444444", linewidth=0.8)
        top = max(max(curve.at(ceiling) for curve in curves), 1.2) * 1.08
        axis.set_ylim(0, top)
        for name, length in marks.items():
            axis.axvline(length, color="#cccccc", linewidth=0.8, zorder=0)
            axis.text(length, top * 0.02, f" {name}", rotation=90, fontsize=7, color="#666666", ha="right", va="bottom")
        axis.set_xlim(1, ceiling)
        axis.set_xlabel("accept length (tokens committed by a verify step)")
        axis.set_ylabel("TPOT speed-up over no speculation")
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
