"""`python -m proof.account.points`: the machine model against 31 published figures of nine configurations.

A configuration is a load with its weights and drafts. Its figures are predicted by a fit to all other configurations,
in both articles.
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
    """Return every published figure with the prediction of a fit that saw no figure of its configuration."""
    cluster, points, found = Cluster(), published_points(), []
    for left_out in sorted({(one.point, one.side) for one in points}):
        fit = fit_points([one for one in points if (one.point, one.side) != left_out], cluster)
        found += [one for one in check(fit, cluster) if (one.point, one.side) == left_out]
    return found


def errors(points: list[PredictedPoint], key: str, ours: bool) -> list[float]:
    """Return the absolute errors of a figure, of W4A8 or of the other weights."""
    return [abs(one.error) for one in points if one.key == key and (one.side not in ("w4a16", "w8a8")) == ours]


def main() -> None:
    """Print the mean errors beside the goals."""
    others = held_out()
    few = [one for one in check(calibrate(Cluster()), Cluster()) if not one.calibrated]
    kinds = (
        "W4A8, with and without drafts",
        "W4A16 and W8A8",
        "W4A8, fit of `bench predict`",
        "W4A16 and W8A8, the same",
    )
    table = Table("figure", "goal", *kinds, title="Mean error, and figures beyond the goal")
    for key, (name, goal) in GOALS.items():
        cells = [
            f"{np.mean(found):.1%}, {sum(error > goal for error in found)} of {len(found)}"
            for points in (others, few)
            for ours in (True, False)
            if (found := errors(points, key, ours))
        ]
        table.add_row(name, f"{goal:.0%}", *cells)
    table_console().print(table)


if __name__ == "__main__":
    main()
