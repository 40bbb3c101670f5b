"""The machine model against the published figures, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ..base.errors import KimiError
from ..bench.statistics import METRICS
from ..predict.predict import Point, mean_error
from .plots import COLOURS, STYLE

_KINDS = ("tpot_median_ms", "itl_median_ms", "ttft_median_ms", "output_throughput_tok_s")


def model_plot(points: Sequence[Point]) -> Figure:
    """One bar of error for each published figure; hatched bars are the ones that calibrated the model."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8.5, 0.24 * len(points) + 1.2))
        ordered = sorted(points, key=lambda each: _KINDS.index(each.key))
        for row, each in enumerate(ordered):
            shade = COLOURS[_KINDS.index(each.key)]
            axis.barh(row, each.error * 100, 0.7, color=shade, alpha=0.35 if each.calibrated else 1.0)
            side = "left" if each.error >= 0 else "right"
            axis.annotate(
                "calibrated" if each.calibrated else f"{each.error:+.0%}",
                (each.error * 100, row),
                (4 if each.error >= 0 else -4, 0),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=7,
            )
        labels = [f"{each.source} {each.point} {each.side}: {METRICS[each.key].title}" for each in ordered]
        axis.set_yticks(range(len(ordered)), labels, fontsize=7.5)
        axis.set_ylim(len(ordered) - 0.4, -0.6)
        axis.axvline(0, color="#444444", linewidth=0.8)
        reach = max(abs(each.error) for each in points) * 130
        axis.set_xlim(-reach, reach)
        axis.set_xlabel("model over published, %")
        axis.set_title(f"Machine model, mean error {mean_error(points):.1%} outside its calibration", loc="left")
        return figure


def save_model_plot(points: Sequence[Point], path: Path) -> None:
    """Write `model_plot` as PNG. Raises KimiError when the file cannot be written."""
    figure = model_plot(points)
    try:
        figure.savefig(path, dpi=160, format="png")
    except OSError as error:
        raise KimiError(f"the plot cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        plt.close(figure)
