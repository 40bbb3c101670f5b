"""Stage 1, h = silu(gate) * up for the routed rows: what both variants of its kernel share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flydsl._mlir.dialects import arith, rocdl

from ...gates import PREFILL_ROWS, STAGE1_TILES
from . import ops as ops
from .block import RoutingAddresses
from .layout import CHUNK_K

WAVES = 4
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Stage1Config:
    """Compile-time parameters of stage 1.

    tile_m: rows a workgroup; tile_n: intermediate channels a workgroup (as many gate and up rows of w13);
    tile_k: k a wave covers in one turn of its loop (decode) or k of one LDS tile (prefill);
    pinned: keep the written order of loads (else the compiler's);
    accumulators: write the int32 sums [slots, 2*inter] instead of h (tests).
    """

    hidden: int
    inter: int
    top_k: int
    tile_m: int = 16
    tile_n: int = 64
    tile_k: int = 256
    pinned: bool = True
    accumulators: bool = False

    @property
    def decode(self) -> bool:
        """Whether the waves split K (decode) or the tile (prefill)."""
        return self.tile_m < PREFILL_ROWS

    @property
    def mfma_per_wave(self) -> int:
        """Matrix instructions that one wave executes."""
        of_workgroup = self.tile_m // 16 * (2 * self.tile_n // 16) * (self.hidden // 32)
        return of_workgroup // WAVES

    @property
    def hints(self) -> dict[str, Any]:
        """Compiler hints: left alone, the compiler loads so far ahead that registers allow two waves a SIMD."""
        far_ahead = not self.pinned and (self.tile_m, self.tile_n) == (16, 64)
        return {"waves_per_eu": 3} if far_ahead else {}

    def grid(self, blocks: Any) -> tuple[Any, ...]:
        """Workgroups for `blocks` row blocks."""
        return self.inter // self.tile_n, blocks, 1

    def problem(self) -> str | None:
        """Why no kernel can be built for these sizes, or None."""
        tile = (self.tile_m, self.tile_n, self.tile_k)
        if tile not in STAGE1_TILES:
            return f"stage 1 has no kernel for tile (m, n, k) {tile}; it has {', '.join(map(str, STAGE1_TILES))}"
        if self.hidden % (WAVES * CHUNK_K):
            return f"hidden size {self.hidden} is not a multiple of {WAVES * CHUNK_K} (stage 1)"
        if self.inter % self.tile_n:
            return f"intermediate size {self.inter} is not a multiple of stage 1 tile_n {self.tile_n}"
        return None


@dataclass
class Arguments:
    """Run-time arguments in launch order; addresses are i64."""

    rows: Any  # int8 [T, hidden]
    row_info: Any  # [T, 2]: float32 scale, int32 low_sum
    weights: Any  # flydsl_layout [E, 2*inter/16, hidden/128, 64, 16]
    w_scale: Any  # float32 [E, 2*inter]
    routing: RoutingAddresses  # with blocks of tile_m rows
    out: Any  # float32 [T * top_k, inter]
    tokens: Any  # i32 T


def silu_mul(gate: Any, up: Any) -> Any:
    """silu(gate) * up element by element on float vectors, with the hardware's exp2 and reciprocal."""
    result = []
    for g, u in zip(ops.elements(gate), ops.elements(up), strict=True):
        exp = rocdl.exp2(ops.f32_type(), arith.mulf(g, ops.const_f32(-LOG2_E)))
        sigmoid = rocdl.rcp(ops.f32_type(), arith.addf(exp, ops.const_f32(1.0)))
        result.append(arith.mulf(arith.mulf(g, sigmoid), u))
    return ops.pack(result)
