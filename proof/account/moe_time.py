"""Model of a MoE layer's time on an MI325X, launch by launch; none of it was measured with this package's kernels.

Stage 1 and stage 2 take what `calibration.py` fits to AITER's timings. AITER's stage 2 adds atomically; this package's
writes slots and takes stage 1's share of the peak. A launch takes 2.5 us and a small kernel 3 to 9 us including it; the
model uses 7.1 us plus its bytes at 4.0 TB/s. Data in the last-level cache moves at 10 TB/s, an assumption (its peak is
17.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_w4a8_eagle3.machine.hardware import Gpu
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_lab.predict.machine_model import INT8_OPS

from .blocks import expected_blocks, padded_to
from .calibration import STAGE1, STAGE2, rates

INT8_TOPS_PER_CU = INT8_OPS / 304 / 1e12  # data sheet
SMALL_US, SMALL_TB_S = 7.1, 4.0
CACHE_TB_S = 10.0
AITER_ROWS = {1024: 16}  # rows per block up to this number of tokens, 64 beyond
_STAGES = {1: STAGE1, 2: STAGE2}


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a forward pass: its launches, the microseconds of all of them, and the formula."""

    name: str
    launches: int
    us: float
    formula: str


def ours(gpu: Gpu, shape: MoeShape, tokens: int) -> list[KernelTime]:
    """Return the launches of this package's kernels."""
    # torch, slow to import
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend, columns_at_once

    kernels: Any = FlydslBackend().configs(shape, tokens)
    slots, columns = tokens * shape.top_k, columns_at_once(kernels, tokens * shape.top_k)
    chunks, rows = -(-shape.hidden // columns), padded_to(kernels["stage1"].tile_m)
    written = slots * shape.hidden * 2
    kept = 0 if kernels["stage1"].decode else slots * shape.inter * 5  # rows that the first chunk quantizes and writes
    by_token = "reduce" not in kernels
    parts = [
        _small("route", tokens * shape.hidden * 3),
        _stage(gpu, shape, tokens, rows, 1),
        _stage(gpu, shape, tokens, rows, 2, chunks, 0 if by_token else written + kept, slots if by_token else None),
        _small("reduce", tokens * shape.hidden * 2, chunks, written),
    ]
    return [part for part in parts if part.name in kernels]


def aiter(gpu: Gpu, shape: MoeShape, tokens: int) -> list[KernelTime]:
    """Return the launches behind the published figures. Stage 2 adds to the output atomically."""
    slots, rows = tokens * shape.top_k, next((m for most, m in AITER_ROWS.items() if tokens <= most), 64)
    return [
        _small("sort, clear", tokens * shape.hidden * 2),
        _small("quantize", tokens * shape.hidden * 3),
        _stage(gpu, shape, tokens, rows, 1),
        _small("quantize2", slots * shape.inter * 3),
        _stage(gpu, shape, tokens, rows, 2, atomic=True),
    ]


def _stage(
    gpu: Gpu,
    shape: MoeShape,
    tokens: int,
    rows: int,
    number: int,
    launches: int = 1,
    cached: int = 0,
    reads: float | None = None,
    atomic: bool = False,
) -> KernelTime:
    """Model stage 1 or 2 with each expert's rows padded to `rows`.

    cached: bytes of slots into the last-level cache, and of rows quantized from there and back. reads: number of
    experts whose weights are read, if not each once. atomic: the slots' rows are added to the output in memory.
    """
    fit = rates()[_STAGES[number]]
    share = fit.share if atomic else rates()[STAGE1].share
    experts, blocks = expected_blocks(shape, tokens, rows)
    experts, rows = experts if reads is None else reads, max(rows, 16)  # the matrix unit pads to 16
    weights = shape.hidden * shape.inter * (3 - number)  # of one expert: gate and up, or down
    read = experts * weights * shape.weights.bits / 8e6  # MB
    peak = share * INT8_TOPS_PER_CU * gpu.compute_units * 1e6  # operations a microsecond
    bounds = {
        f"{read:.0f} MB / {fit.tb_s:.1f} TB/s": read / fit.tb_s,
        f"{blocks * rows:.0f} rows at {share:.0%} of the peak": 2 * blocks * rows * weights / peak,
        f"{cached / 1e6:.0f} MB through the cache": cached / 1e6 / CACHE_TB_S,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    formula, us = (f"{launches} x " if launches > 1 else "") + f"{fit.us:.1f} us + {bound}", launches * fit.us
    if atomic:
        added = tokens * shape.top_k * shape.hidden * 2 / 1e6
        formula, us = formula + f" + {added:.0f} MB / {fit.added_tb_s:.1f} TB/s", us + added / fit.added_tb_s
    return KernelTime(f"stage{number}", launches, us + bounds[bound], formula)


def _small(name: str, memory: float, launches: int = 1, cached: float = 0) -> KernelTime:
    us = launches * SMALL_US + memory / 1e6 / SMALL_TB_S + cached / 1e6 / CACHE_TB_S
    fixed = f"{launches} x {SMALL_US} us" if launches > 1 else f"{SMALL_US} us"
    return KernelTime(name, launches, us, f"{fixed} + {(memory + cached) / 1e6:.1f} MB")
