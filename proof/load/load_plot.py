"""A load over time: tokens a second, requests that went wrong, and what happened to the fleet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from kimi_w4a8_eagle3.base.files import write_atomic

from .load import throughput
from .load_request import GOOD, Outcome, Record

_SHADES = ("#f2f4f7", "#e3e8ef")
_BAD_COLOURS = {Outcome.TRUNCATED: "#b5485a", Outcome.WRONG: "#b5485a"}


def timeline(
    path: Path,
    records: Sequence[Record],
    since: float,
    until: float,
    spans: Sequence[tuple[str, float, float]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> None:
    """Draw the time from `since` to `until` (Unix seconds) into a PNG.

    spans: (name, from, to) shaded in turn. marks: (when, what) as lines. Crosses: requests whose client saw an error.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from kimi_w4a8_eagle3.report.plots import STYLE

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.6))
        points = throughput(records, since, until)
        top = max((value for _, value in points), default=0.0) * 1.1 or 1.0
        for number, (name, began, ended) in enumerate(spans):
            axes.axvspan(began - since, ended - since, color=_SHADES[number % 2], zorder=0)
            height = 1.02 + 0.07 * (number % 2)  # short phases lie side by side
            axes.text(began - since, top * height, name, ha="left", va="bottom", fontsize=8)
        for at, what in marks:
            axes.axvline(at - since, color="#8c8c8c", linewidth=0.8, linestyle=":")
            axes.text(at - since, top * 0.98, what, rotation=90, fontsize=6, va="top", ha="right", color="#555555")
        axes.step([x for x, _ in points], [y for _, y in points], where="mid", color="#2f6db5", linewidth=1.2)
        for record in records:
            if record.outcome not in GOOD and record.outcome is not Outcome.LEFT and since <= record.ended < until:
                colour = _BAD_COLOURS.get(record.outcome, "#c8772e")
                axes.plot(record.ended - since, top * 0.06, "x", color=colour, markersize=5)
        axes.set(xlabel="seconds", ylabel="output, tok/s", xlim=(0, until - since), ylim=(0, top))
        picture = io.BytesIO()
        figure.savefig(picture, dpi=130, format="png")
        plt.close(figure)
    write_atomic(path, picture.getvalue())
