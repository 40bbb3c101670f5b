"""Pictures of the pages, drawn with matplotlib as SVG that follows the reader's light or dark mode."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..speed import published
from ..speed.runs import Cell, Groups
from ..speed.statistics import METRICS, Interval
from .page import Bar, Picture
from .shapes import Shape
from .speedup import Speedup

# Grey, blue and green for the three configurations of the article; further sides take the next colours.
_ARTICLE = {"w4a8": "#8c8c8c", "eagle3": "#3f7fc4", "eagle3-opt": "#3a9a5b"}
COLOURS = ["#3f7fc4", "#c8772e", "#8a6bb0", "#3a9a5b", "#b5485a", "#4aa3a3"]
_PANELS = ("tpot_median_ms", "output_throughput_tok_s", "tpot_p99_ms", "itl_median_ms", "ttft_median_ms")
_INK, _LINE, _DARK_INK, _DARK_LINE = "#1c1c1f", "#d9d9dd", "#e6e6ea", "#4a4a52"
_DARK = "".join(
    f'[style*="{name}: {light}"] {{ {name}: {dark} !important }} '
    for light, dark in ((_INK, _DARK_INK), (_LINE, _DARK_LINE))
    for name in ("fill", "stroke")
)
_STYLE = f"<style>@media (prefers-color-scheme: dark) {{ {_DARK}}}</style>".encode()
_LOOK: Any = {
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a side's name is shown as written
}


Bars = Mapping[str, Sequence[Bar]]  # metric key (or accept_length) -> bars


def bars(groups: Groups) -> dict[str, list[Bar]]:
    """Return the bars of all measured cells, with the published values of the points that they reproduce."""
    found: dict[str, list[Bar]] = {key: [] for key in (*_PANELS, "accept_length")}
    for (workload, concurrency), sides in groups.items():
        for side, cell in sides.items():
            group = workload if len(cell.workload.concurrency) == 1 else f"{workload} c={concurrency}"
            values = {key: cell.figures[key] for key in _PANELS}
            if cell.accept_length is not None:
                values["accept_length"] = Interval(cell.accept_length, None, None)
            reported = published.points().get(cell.workload.reference or "", {}).get(side, {})
            for key, value in values.items():
                found[key].append(Bar(group, side, False, value))
                if key in reported:
                    found[key].append(Bar(group, side, True, Interval(reported[key], None, None)))
    return found


def panels(found: Bars) -> Iterator[Picture]:
    """Yield one picture for TPOT, throughput, TPOT P99, ITL, TTFT and accept length; TPOT comes first."""
    sides = list(dict.fromkeys(bar.side for same in found.values() for bar in same))
    for key, same in found.items():
        if same:
            metric = METRICS.get(key)
            name = f"{metric.title} ({metric.unit})" if metric else "accept length (tokens per verify step)"
            yield panel(key, name, same, sides)


def panel(key: str, name: str, same: Sequence[Bar], sides: Sequence[str] = ()) -> Picture:
    """Draw horizontal bars by group. Published bars are hollow. sides: in the order of their colours."""
    sides = sides or list(dict.fromkeys(bar.side for bar in same))
    groups = list(dict.fromkeys(bar.group for bar in same))
    rows = sorted(same, key=lambda bar: (groups.index(bar.group), sides.index(bar.side), not bar.published))
    with plt.rc_context(_LOOK):
        figure, axis = plt.subplots(figsize=(5.2, min(0.7 + 0.26 * len(rows) + 0.15 * len(groups), 5.2)))
        axis.set_title(name, loc="left")
        at = [row + 0.6 * groups.index(bar.group) for row, bar in enumerate(rows)]
        for y, bar in zip(at, rows, strict=True):
            shade = _colour(bar.side, sides)
            axis.barh(y, bar.value.value, 0.8, facecolor="none" if bar.published else shade, edgecolor=shade)
            end = max(bar.value.value, bar.value.high or 0)
            if bar.value.low is not None and bar.value.high is not None:
                axis.plot([bar.value.low, bar.value.high], [y, y], color=_INK, linewidth=1)
            label = _short(bar.value.value) + " published" * (bar.published and bar.side != "published")
            axis.annotate(label, (end, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
        centres = [np.mean([y for y, bar in zip(at, rows, strict=True) if bar.group == group]) for group in groups]
        axis.set_yticks(centres, [f"{name:.24}" for name in groups])  # the alternative text has all of it
        axis.set_xlim(0, 1.18 * max(bar.value.high or bar.value.value for bar in rows))
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        values = (f"{bar.group} {bar.side}{' published' * bar.published} {_short(bar.value.value)}" for bar in same)
        legend = [(side, _colour(side, sides)) for side in sides]
        return Picture(key, f"{name}: {'; '.join(values)}", _svg(figure, axis), legend)


def ttft_by_turn(cells: Sequence[Cell]) -> Picture | None:
    """Draw the median TTFT of each turn of conversations; None without any."""
    rows = [
        Bar(f"turn {number}", cell.side, False, Interval(turn.ttft_median_ms, None, None))
        for cell in cells
        for number, turn in enumerate(cell.measurements[0].turns, 1)
    ]
    return panel("turns", "TTFT median by turn (ms)", rows) if rows else None


def speedup_by_shape(found: Sequence[Shape]) -> Picture:
    """Draw the measured speed-up of each shape beside that of its decoding alone."""
    rows = []
    for one in found:
        group = f"{one.lengths} c={one.concurrency}"
        rows.append(Bar(group, one.side, False, one.speedup))
        rows.append(Bar(group, "decoding alone", False, Interval(one.decode_speedup, None, None)))
    return panel("shapes", "speed-up of the output throughput by shape (times)", rows)


def speedup_curves(curves: Sequence[Speedup]) -> Picture:
    """Plot the TPOT speed-up over the accept length, with measurements, break-even points and known texts."""
    ceiling, legend = 4.0, []  # accept length with four draft tokens
    lengths = np.linspace(1, ceiling, 200)
    with plt.rc_context(_LOOK):
        figure, axis = plt.subplots(figsize=(5.6, 3.6))
        for at, curve in enumerate(curves):
            shade = COLOURS[at % len(COLOURS)]
            style = "-" if curve.measured_here else "--"
            even = f"breaks even at {curve.break_even:.2f}" if curve.break_even <= ceiling else "never breaks even"
            legend.append((f"{curve.title} ({even})", shade))
            axis.plot(lengths, [curve.at(length) for length in lengths], style, color=shade)
            axis.plot(curve.accept_length, curve.measured, "o", color=shade)
        axis.axhline(1, color=_INK, linewidth=0.8)
        top = max(max(curve.at(ceiling) for curve in curves), 1.2) * 1.08
        for text in published.accept_lengths():
            if text.mark:
                axis.axvline(text.accept_length, color=_LINE, linewidth=0.8, zorder=0)
                at_foot = (text.accept_length, top * 0.02)
                axis.text(*at_foot, f" {text.mark}", rotation=90, fontsize=7, ha="right", va="bottom")
        axis.set(xlim=(1, ceiling), ylim=(0, top), ylabel="TPOT speed-up over no speculation")
        axis.set_xlabel("accept length (tokens committed by a verify step)")
        alt = (f"{curve.title}: {curve.measured:.2f}x at accept length {curve.accept_length:.2f}" for curve in curves)
        return Picture("speedup", "; ".join(alt), _svg(figure, axis), legend)


def _svg(figure: Figure, axis: Axes) -> bytes:
    """Return the figure as SVG, with colours for the dark mode."""
    axis.grid(axis="x")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue().replace(b"<defs>", _STYLE + b"<defs>", 1)


def _colour(side: str, sides: Sequence[str]) -> str:
    """Return a side's colour: grey for plain sides, the article's for its configurations, else the next free one."""
    if side in _ARTICLE or side.endswith(":plain"):
        return _ARTICLE.get(side, "#8c8c8c")
    others = [name for name in sides if name not in _ARTICLE and not name.endswith(":plain")]
    return COLOURS[others.index(side) % len(COLOURS)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
