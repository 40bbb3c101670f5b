"""Model of a MoE layer's time on an MI325X, launch by launch; none of it was measured with this package's kernels.

Calibration: published AITER timings of Kimi's MoE on an MI355X are 11.3 us + bytes / 5.2 TB/s for stage 1 and 8.3 us +
bytes / 4.8 TB/s for stage 2. Tuned kernels reach 4.4 and 4.0 TB/s on an MI325X. A launch takes 2.5 us and a small
kernel 3 to 9 us including it; the model uses 7.1 us plus its bytes at 4.0 TB/s. Data in the last-level cache moves at
10 TB/s, an assumption (its peak is 17.2). A stage takes at least its MFMA time, with rows padded to the kernel's tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_w4a8_eagle3.machine.hardware import Gpu
from kimi_w4a8_eagle3.moe.contract import MoeShape

INT8_TOPS_PER_CU = 2614.9 / 304  # data sheet
STAGE_US = {1: 11.3, 2: 8.3}
STAGE_TB_S = {1: 4.4, 2: 4.0}
SMALL_US, SMALL_TB_S = 7.1, 4.0
CACHE_TB_S = 10.0
AITER_ROWS = {1024: 16}  # rows per block up to this number of tokens, 64 beyond


@dataclass(frozen=True)
class Part:
    """One kernel of a forward pass: its launches, the microseconds of all of them, and the formula."""

    name: str
    launches: int
    us: float
    formula: str


def ours(gpu: Gpu, shape: MoeShape, tokens: int) -> list[Part]:
    """Return the launches of this package's kernels."""
    # torch, slow to import
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend, columns_at_once
    from kimi_w4a8_eagle3.moe.flydsl.configs import padded_to

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


def aiter(gpu: Gpu, shape: MoeShape, tokens: int) -> list[Part]:
    """Return the launches behind the published figures. Stage 2 adds atomically, in prefill at half stage 1's speed."""
    slots, rows = tokens * shape.top_k, next((m for most, m in AITER_ROWS.items() if tokens <= most), 64)
    stage1, stage2 = (_stage(gpu, shape, tokens, rows, number) for number in (1, 2))
    if stage1.us > stage2.us and rows >= 64:
        stage2 = Part("stage2", 1, stage1.us, "as long as stage 1 (published, T = 8,192)")
    return [
        _small("sort, clear", tokens * shape.hidden * 2),
        _small("quantize", tokens * shape.hidden * 3),
        stage1,
        _small("quantize2", slots * shape.inter * 3),
        stage2,
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
) -> Part:
    """Model stage 1 or 2 with each expert's rows padded to `rows`.

    cached: bytes of slots into the last-level cache, and of rows quantized from there and back. reads: number of
    experts whose weights are read, if not each once.
    """
    experts, blocks = expected_blocks(shape, tokens, rows)
    experts, rows = experts if reads is None else reads, max(rows, 16)  # the matrix unit pads to 16
    weights = shape.hidden * shape.inter * (3 - number)  # of one expert: gate and up, or down
    peak = INT8_TOPS_PER_CU * gpu.compute_units * 1e6  # operations a microsecond
    bounds = {
        f"{experts * weights / 2e6:.0f} MB / {STAGE_TB_S[number]} TB/s": experts * weights / 2e6 / STAGE_TB_S[number],
        f"{blocks * rows:.0f} rows by MFMA": 2 * blocks * rows * weights / peak,
        f"{cached / 1e6:.0f} MB through the cache": cached / 1e6 / CACHE_TB_S,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    fixed = f"{launches} x {STAGE_US[number]} us" if launches > 1 else f"{STAGE_US[number]} us"
    return Part(f"stage{number}", launches, launches * STAGE_US[number] + bounds[bound], f"{fixed} + {bound}")


def _small(name: str, memory: float, launches: int = 1, cached: float = 0) -> Part:
    us = launches * SMALL_US + memory / 1e6 / SMALL_TB_S + cached / 1e6 / CACHE_TB_S
    fixed = f"{launches} x {SMALL_US} us" if launches > 1 else f"{SMALL_US} us"
    return Part(name, launches, us, f"{fixed} + {(memory + cached) / 1e6:.1f} MB")


def expected_blocks(shape: MoeShape, tokens: int, tile_m: int) -> tuple[float, float]:
    """Return (distinct experts, row blocks) if each token takes top_k different experts at random."""
    p = shape.top_k / shape.num_experts
    experts, blocks = 0.0, 0.0
    probability = (1 - p) ** tokens
    # Each binomial term follows from the one before. Large batches, which underflow at 0 rows, use the limit.
    if probability > 1e-250:
        for rows in range(1, tokens + 1):
            probability *= (tokens - rows + 1) / rows * p / (1 - p)
            experts += probability
            blocks += probability * -(-rows // tile_m)
    else:
        experts, blocks = 1.0, tokens * p / tile_m + 0.5
    return experts * shape.num_experts, blocks * shape.num_experts
