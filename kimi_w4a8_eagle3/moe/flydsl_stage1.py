"""Stage 1, h = silu(gate) * up for the routed rows: configuration, arguments and launcher of both variants.

`flydsl_stage1_decode` (tile_m 16, 32) is bound by reading weights, `flydsl_stage1_prefill` (64, 128) by the matrix
unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import arith, rocdl

from . import flydsl_ops as ops
from .flydsl_block import RoutingAddresses
from .flydsl_layout import CHUNK_K
from .flydsl_toolchain import cache_tag

WAVES = 4
LOG2_E = 1.4426950408889634
TILES = (
    *((m, n, k) for m in (16, 32) for n in (32, 64) for k in (128, 256)),
    (64, 64, 128),
    (64, 128, 128),
    (128, 64, 128),
)


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
        return self.tile_m < 64

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
        if tile not in TILES:
            return f"stage 1 has no kernel for tile (m, n, k) {tile}; it has {', '.join(map(str, TILES))}"
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


def build(cfg: Stage1Config) -> Any:
    """The launcher of one configuration: (ten addresses, tokens, blocks launched, stream)."""

    from .flydsl_stage1_decode import Stage1Decode
    from .flydsl_stage1_prefill import Stage1Prefill

    workgroup: Any = Stage1Decode if cfg.decode else Stage1Prefill

    tag = cache_tag(cfg)

    @flyc.kernel(known_block_size=[WAVES * ops.WAVE, 1, 1])
    def moe_stage1(
        rows: fx.Int64,
        row_info: fx.Int64,
        weights: fx.Int64,
        w_scale: fx.Int64,
        order: fx.Int64,
        block_expert: fx.Int64,
        block_first: fx.Int64,
        block_rows: fx.Int64,
        num_blocks: fx.Int64,
        out: fx.Int64,
        tokens: fx.Int32,
    ) -> None:
        ops.identify(tag)
        routing = RoutingAddresses(order, block_expert, block_first, block_rows, num_blocks)
        workgroup(cfg, Arguments(rows, row_info, weights, w_scale, routing, out, tokens)).run()

    @flyc.jit
    def launch(
        rows: fx.Int64,
        row_info: fx.Int64,
        weights: fx.Int64,
        w_scale: fx.Int64,
        order: fx.Int64,
        block_expert: fx.Int64,
        block_first: fx.Int64,
        block_rows: fx.Int64,
        num_blocks: fx.Int64,
        out: fx.Int64,
        tokens: fx.Int32,
        blocks: fx.Int32,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        moe_stage1(
            rows, row_info, weights, w_scale, order, block_expert, block_first, block_rows, num_blocks, out, tokens
        ).launch(grid=cfg.grid(blocks), block=(WAVES * ops.WAVE, 1, 1), stream=stream)

    launch.compile_hints = cfg.hints
    return launch
