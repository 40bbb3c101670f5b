"""`python -m proof.account.points`: the machine model against 31 published figures, each predicted from the other half.

The figures are split in two halves, every second one. The three unknowns are fitted to one half and predict the other.
"""

from __future__ import annotations

import numpy as np
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import PredictedPoint, calibrate, check, fit_points, published_points

GOALS = {
    "tpot_median_ms": ("TPOT", 0.08),
    "output_throughput_tok_s": ("throughput", 0.08),
    "ttft_median_ms": ("TTFT", 0.15),
}


def held_out() -> list[PredictedPoint]:
    """Return every published figure with the prediction of a fit that did not see it."""
    cluster, points, found = Cluster(), published_points(), []
    for half in (0, 1):
        fit = fit_points(points[half::2], cluster)
        found += check(fit, cluster)[1 - half :: 2]
    return found


def errors(points: list[PredictedPoint], key: str, ours: bool) -> list[float]:
    """Return the absolute errors of a figure, of W4A8 or of the other weights."""
    return [abs(one.error) for one in points if one.key == key and (one.side not in ("w4a16", "w8a8")) == ours]


def main() -> None:
    """Print the mean errors beside the goals."""
    halves = held_out()
    few = [one for one in check(calibrate(Cluster()), Cluster()) if not one.calibrated]
    kinds = ("W4A8, with and without drafts", "W4A16 and W8A8", "all", "all, fitted to 3 figures")
    table = Table("figure", "goal", *kinds, "beyond", title="Mean error on figures that did not fit the model")
    for key, (name, goal) in GOALS.items():
        ours, others = errors(halves, key, True), errors(halves, key, False)
        three = errors(few, key, True) + errors(few, key, False)
        cells = (f"{np.mean(found):.1%} of {len(found)}" for found in (ours, others, ours + others, three))
        missed = f"{sum(error > goal for error in three)} of {len(three)}"
        table.add_row(name, f"{goal:.0%}", *cells, missed)
    table_console().print(table)


if __name__ == "__main__":
    main()
