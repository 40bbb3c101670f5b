"""Stage 1 for prefill: 64 or 128 routed rows a workgroup, bound by the matrix unit.

A wave computes 64 rows x (16 or 32 gate and as many up channels); it branches around products with 32 rows that do not
exist. Rows go through LDS, 128 k at a time and double buffered, in exactly the order in which lanes read MFMA operands,
so neither side has bank conflicts. Weights go straight to registers. The LDS tile that a step writes was last read
before the previous step's barrier, so one barrier a step is enough.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr.typing import T

from ..configs import WAVES, Stage1Config
from ..kernel_arguments import Stage1Arguments
from ..layout import CHUNK_K
from . import ops as ops
from .block import RowBlock, Stage1State, Stage1Workgroup, work_of
from .ops import Value

ROW_TILES = 4  # 16-row tiles of a wave
ROW_TILE_BYTES = 16 * CHUNK_K


class Stage1Prefill(Stage1Workgroup):
    """One workgroup: `tile_m` sorted rows x `tile_n` channels of gate and up."""

    ring_bytes, waves_k, row_tiles = 4096, 1, ROW_TILES

    def __init__(self, cfg: Stage1Config, args: Stage1Arguments) -> None:
        super().__init__(cfg, args)
        self.column, block, here = fx.block_idx.x, fx.block_idx.y, None
        if cfg.by_xcd:
            columns = cfg.inter // cfg.tile_n
            work, here = work_of(block * columns + self.column, args.blocks, columns)
            block, self.column = work // columns, work % columns
        self.block = RowBlock(args, block, args.tokens * cfg.top_k, cfg.top_k, here)
        self.waves_m = cfg.tile_m // (16 * ROW_TILES)
        self.pairs = cfg.tile_n // 16 * self.waves_m // WAVES  # gate tiles of a wave, and up tiles
        self.staged = cfg.tile_m // 16 // WAVES  # row tiles that this wave brings to LDS

    def open_buffers(self) -> None:
        super().open_buffers()
        self.rows = ops.buffer(self.args.rows, self.args.tokens * self.cfg.hidden)
        self.lds = ops.lds_alloc(2 * self.cfg.tile_m * CHUNK_K)
        self.groups = self.block.together(self.wave % self.waves_m * (16 * ROW_TILES), ROW_TILES)

    def first_at(self, tile: int) -> Value:
        self.weight_lane = self.lane * 16
        self.first_tile = self.column * (self.cfg.tile_n // 16) + self.wave // self.waves_m * self.pairs
        return self.first_tile * tile

    def slots_of(self, first_row: Value, tiles: int) -> list[fx.Int32]:
        """Return the slot of each lane's row, for `tiles` 16-row tiles."""
        return [self.block.slot(first_row + (self.lane & 15) + 16 * m) for m in range(tiles)]

    def stage_rows(self, fetched: list[Any], chunk: Value) -> None:
        """Write fetched rows to the LDS tile of their chunk."""
        at = (chunk & 1) * (self.cfg.tile_m * CHUNK_K) + self.wave * (self.staged * ROW_TILE_BYTES) + self.lane * 16
        for i, part in enumerate(fetched):
            ops.lds_store(self.lds, part, at + i * 1024)

    def read_rows(self, chunk: Value) -> list[Any]:
        """Read this wave's rows of one chunk from LDS."""
        wave_m = self.wave % self.waves_m
        at = (chunk & 1) * (self.cfg.tile_m * CHUNK_K) + wave_m * (ROW_TILES * ROW_TILE_BYTES) + self.lane * 16
        return [ops.lds_load(self.lds, T.i32x4, at + i * 1024) for i in range(2 * ROW_TILES)]

    def main_loop(self) -> list[Any]:
        """Return this wave's sums: two accumulators for each tile and row tile."""
        staged_slots = self.slots_of(self.wave * (16 * self.staged), self.staged)
        corner = self.weights.corner(self.lane)
        self.row_lane = [self.block.token(s) * self.cfg.hidden + corner for s in staged_slots]
        self.stage_rows(self.load_rows(fx.Int32(0)), fx.Int32(0))
        weights = [[self.load_weight(fx.Int32(c), t) for t in range(self.tiles)] for c in range(self.ring)]
        zero = ops.splat(ops.const_i32(0), 4)
        state = Stage1State(weights, [], [zero] * (2 * self.tiles * ROW_TILES))
        ops.barrier()
        refilled = self.chunks - self.ring
        return self.over_chunks(state, min(refilled, self.ring + refilled % 2), 2).sums

    def step(self, chunk: Value, state: Stage1State, refill: bool, more: bool) -> Stage1State:
        """Multiply one chunk of 128 k; `refill` the weight ring behind it and bring the next rows to LDS if `more`."""
        fetched = self.load_rows(chunk + 1) if more else []
        rows = self.operands(self.read_rows(chunk))
        self.pin()
        state = self.multiply(state, chunk, rows, refill)
        if more:
            self.stage_rows(fetched, chunk + 1)
            ops.barrier()
        return state

    def finish(self, sums: list[Any]) -> None:
        """Scale, apply SiLU and store: a lane holds four channels of one row for each pair of tiles."""
        cfg, slots = self.cfg, self.slots_of(self.wave % self.waves_m * (16 * ROW_TILES), ROW_TILES)
        info = self.row_info(map(self.block.token, slots))
        scales, out = ops.item(self.args.w_scale, self.block.expert, 2 * cfg.inter * 4), self.results()
        lane_channel = (self.lane >> 4) * 4
        for t in range(self.pairs):
            channel = (self.first_tile + t) * 16
            w_scale = [ops.load(scales, T.f32x4, lane_channel * 4, (channel + h * cfg.inter) * 4) for h in (0, 1)]
            for m in range(ROW_TILES):
                tiles = [2 * ((half * self.pairs + t) * ROW_TILES + m) for half in (0, 1)]
                both = (self.weights.total(sums[i], sums[i + 1]) for i in tiles)
                exact = self.exact(both, info[m])
                place = slots[m] * (cfg.inter * 4) + lane_channel * 4
                ops.store(out, ops.silu_mul(*self.scaled(exact, info[m], w_scale)), place, channel * 4)
