"""Output tokens a second and GPU, as the MI355X articles give them, beside the recipe's published figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import KimiError
from ..recipe_schema import Recipe
from ..recipes import load_recipe
from ..vllm_bench import SHORTEST, TOKENS
from .runs import Run, grouped
from .workloads import Workload

_ARCH = "gfx950"


@dataclass(frozen=True)
class PerGpu:
    """The median over the measurements of one concurrency. difference: measured / published - 1."""

    workload: str
    side: str
    concurrency: int
    gpus: int
    measured: float
    published: float | None
    difference: float | None
    verdict: str


def compare_per_gpu(run: Run) -> list[PerGpu]:
    """One row for each workload, concurrency and side whose number of GPUs is recorded."""
    found = []
    for (workload, concurrency), sides in grouped([run]).items():
        for side, pairs in sides.items():
            counts = {each.gpus for _, each in pairs}
            gpus = counts.pop() if len(counts) == 1 else None
            if not gpus:
                continue
            measured = float(np.median([each.load.output_throughput for _, each in pairs])) / gpus
            published = _published(side, pairs[0][1].workload, concurrency)
            difference = None if published is None else measured / published - 1
            verdict = "no published figure for this" if published is None else why_not_comparable(run, gpus)
            found.append(PerGpu(workload, side, concurrency, gpus, measured, published, difference, verdict))
    return found


def why_not_comparable(run: Run, gpus: int) -> str:
    """One sentence when the server's GPUs are not known to be MI355X; empty when they are."""
    hardware = run.record.get("hardware") or {}
    if not hardware.get("known", True):
        return "not comparable: the server runs on another machine, whose GPUs are not known here"
    found = hardware.get("gpus") or []
    if len(found) < gpus or set(found) != {_ARCH}:
        return (
            f"not comparable: measured with {len(found)} x {', '.join(sorted(set(found))) or 'no AMD GPU'}, not MI355X"
        )
    return ""


def _published(side: str, workload: Workload, concurrency: int) -> float | None:
    """The recipe's published figure, for the published lengths through the chat template only."""
    recipe = _recipe(side)
    lengths = (workload.dataset, workload.input_len, workload.output_len, workload.range_ratio, workload.chat_template)
    if recipe is None or recipe.published is None or lengths != ("random", TOKENS, TOKENS, SHORTEST, True):
        return None
    return recipe.published.tok_s_per_gpu.get(str(concurrency))


def _recipe(name: str) -> Recipe | None:
    try:
        return load_recipe(name)
    except KimiError:
        return None
