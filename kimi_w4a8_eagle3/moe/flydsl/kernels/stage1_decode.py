"""Stage 1 for decode: h = silu(gate) * up for 16 or 32 routed rows a workgroup, bound by reading the weights.

The four waves of a workgroup split K: chunk c of 128 k belongs to wave c % 4. Every wave streams its own weights and
reads its own part of the rows straight into MFMA operands. The main loop has no LDS and no barrier; the waves' integer
sums meet once, in the epilogue. A ring of weight registers keeps `ring_bytes` of loads in flight: a slot of the ring is
loaded again as soon as its weights are unpacked.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.typing import T

from ..configs import WAVES, Stage1Config
from ..kernel_arguments import Stage1Arguments
from ..layout import CHUNK_K, TILE_BYTES
from . import ops as ops
from .block import RowBlock, Stage1State, Stage1Workgroup
from .ops import Value


class Stage1Decode(Stage1Workgroup):
    """One workgroup: `tile_m` sorted rows x `tile_n` channels of gate and up."""

    ring_bytes, waves_k = 8192, WAVES

    def __init__(self, cfg: Stage1Config, args: Stage1Arguments) -> None:
        super().__init__(cfg, args)
        self.column = fx.block_idx.x
        self.row_tiles = cfg.row_tiles
        self.groups = [(range(m, m + 1), None) for m in range(self.row_tiles)]
        self.pairs = cfg.tile_n // 16
        self.block = self.find_block()

    def find_block(self) -> RowBlock:
        return RowBlock(self.args, fx.block_idx.y, self.args.tokens * self.cfg.top_k, self.cfg.top_k)

    def open_buffers(self) -> None:
        """Open the block's tables and buffers, and find the slots of this lane's rows."""
        super().open_buffers()
        self.slot = [self.block.slot((self.lane & 15) + 16 * m) for m in range(self.row_tiles)]
        self.rows = ops.buffer(self.args.rows, self.args.tokens * self.cfg.hidden)

    def first_at(self, tile: int) -> Value:
        self.weight_lane = self.lane * 16 + self.wave * TILE_BYTES
        return self.column * (self.pairs * tile)

    def start_rows(self) -> None:
        """Compute the row offsets, which wait for the row numbers while the first weights are loading."""
        self.token = [self.block.token(s) for s in self.slot]
        corner = self.weights.corner(self.lane) + self.wave * CHUNK_K
        self.row_lane = [t * self.cfg.hidden + corner for t in self.token]

    def main_loop(self) -> list[Any]:
        """Return this wave's sums: two accumulators for each tile and row tile."""
        weights = [[self.load_weight(fx.Int32(c), t) for t in range(self.tiles)] for c in range(self.ring)]
        ops.pin_schedule()  # start the weight loads before waiting for the row numbers
        self.start_rows()
        rows = [self.load_rows(fx.Int32(c)) for c in range(self.ring)]
        zero = ops.splat(ops.const_i32(0), 4)
        state = Stage1State(weights, rows, [zero] * (2 * self.tiles * self.row_tiles))

        # A turn of the rolled loop covers `turn` chunks. Chunks that do not fill turns run before it, at least one ring
        # of them, so that the loop starts with its loads in the order in which its own turns leave them.
        turn = max(self.cfg.tile_k // CHUNK_K, self.ring)
        refilled = self.chunks - self.ring
        return self.over_chunks(state, min(refilled, self.ring + (refilled - self.ring) % turn), turn).sums

    def step(self, chunk: Value, state: Stage1State, refill: bool, more: bool) -> Stage1State:
        """Multiply the oldest chunk of the ring, and load another in its place if `refill`."""
        current = self.operands(state.rows[0])
        ahead = [self.load_rows(chunk + self.ring)] if refill else []
        self.pin()
        return self.multiply(state._replace(rows=[*state.rows, *ahead]), chunk, current, refill)

    def finish(self, sums: list[Any]) -> None:
        """Add the four waves' sums, scale, apply SiLU and store: wave w finishes channel tile w."""
        cfg, tile = self.cfg, self.column * self.pairs + self.wave % self.pairs
        channel = tile * 16 + (self.lane >> 4) * 4
        scales = ops.item(self.args.w_scale, self.block.expert, 2 * cfg.inter * 4)
        w_scale = [ops.load(scales, T.f32x4, channel * 4, half * cfg.inter * 4) for half in (0, 1)]
        lds, info = self.exchange(WAVES * self.pairs * self.row_tiles * 1024)
        gate, up = (self.sum_over_waves(lds, sums, half) for half in (0, 1))
        with ops.when(self.wave < self.pairs):
            for m in range(self.row_tiles):
                both = self.scaled(self.exact([gate[m], up[m]], info[m]), info[m], w_scale)
                ops.store(self.results(), ops.silu_mul(*both), self.slot[m] * (cfg.inter * 4) + channel * 4)

    def exchange(self, size: int) -> tuple[Any, list[Any]]:
        """Return (`size` bytes of LDS for the sums, [scale, low sum] of each row tile's rows)."""
        return ops.lds_alloc(size), self.row_info(self.token)

    def sum_over_waves(self, lds: Value, sums: list[Any], half: int) -> list[Any]:
        """Exchange gate (half 0) or up tiles through LDS; return the total of this wave's tile for each row tile."""
        if half:
            ops.barrier()  # the other half has been read
        wave_bytes = self.pairs * self.row_tiles * 1024
        for t in range(self.pairs):
            for m in range(self.row_tiles):
                at = 2 * ((half * self.pairs + t) * self.row_tiles + m)
                total = self.weights.total(sums[at], sums[at + 1])
                ops.lds_store(lds, total, self.wave * wave_bytes + self.lane * 16 + (t * self.row_tiles + m) * 1024)
        ops.barrier()
        totals = []
        for m in range(self.row_tiles):
            at = (self.wave % self.pairs) * (self.row_tiles * 1024) + self.lane * 16 + m * 1024
            parts = [ops.lds_load(lds, T.i32x4, at + w * wave_bytes) for w in range(WAVES)]
            totals.append(arith.addi(arith.addi(parts[0], parts[1]), arith.addi(parts[2], parts[3])))
        return totals
