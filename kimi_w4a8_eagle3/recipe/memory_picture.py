"""Picture of a recipe's memory by GPU model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..base.errors import KimiError, UsageError
from .memory_plan import MemoryPlan


def draw(plans: Sequence[MemoryPlan], path: Path) -> None:
    """Draw one stacked horizontal bar for each GPU; parts below 4 % of the memory appear only in the legend."""
    figure = Figure(figsize=(11, 2.8 + 0.8 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    widest = max(plan.gpu.hbm_gib for plan in plans)
    for row, plan in enumerate(plans):
        left = 0.0
        for number, (part, size) in enumerate(plan.segments.items()):
            gib = size / 2**30
            color = (0.88, 0.88, 0.88, 1.0) if part == "reserve" else colormaps["tab20"](number)
            label = f"{part} {gib:.1f}" if len(plans) == 1 else part if row == 0 else None
            axes.barh(row, gib, left=left, color=color, edgecolor="white", label=label)
            if gib > 0.04 * widest:
                axes.text(left + gib / 2, row, f"{gib:.0f}", ha="center", va="center", fontsize=9)
            left += gib
    limits = [plan.verdict.binding.name if plan.verdict.binding else "memory" for plan in plans]
    pools = [f"{plan.gpu.name}\n{plan.tokens:,} tokens\n({limit})" for plan, limit in zip(plans, limits, strict=True)]
    axes.set(xlim=(0, widest), yticks=range(len(plans)), yticklabels=pools, xlabel="GiB of one GPU")
    axes.invert_yaxis()
    axes.set_title(f"{plans[0].recipe}, TP {plans[0].tp}: memory and KV pool", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"cannot draw to {path.name!r}", where="--output", expected="a .png, .svg or .pdf file")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise KimiError(
            f"cannot write the picture: {error.strerror}", where=str(path), remedy="choose another file with --output"
        ) from None
