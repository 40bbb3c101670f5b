"""Stage 2: the down projection of the routed rows, one float16 row a slot; `rows.Reduce` sums a token's slots.

K is short (256 at TP 8, 512 at TP 4), so a wave keeps its rows in registers for its whole life and streams weight tiles
past them. A ring of weight registers keeps RING_BYTES of loads in flight. The kernels that serve quantize their rows
meanwhile (stage2_quantize.py). Rows that a block lacks cost nothing in prefill, 32 at a time.

A slot's row is acc * (weight scale / its expert's largest), which fits float16 whatever the scales are. Factors that
depend on the slot are multiplied in float32 in the reduction. One launch computes `columns` of the channels: a
prefill's slots are written and read again by chunks that stay in the last-level cache (see backend.py).

Two tiles make one store: channels are packed in pairs of tiles (`layout.PAIR`), so that a lane ends with eight
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import flydsl.expr as fx
from flydsl.expr.typing import T

from ..configs import Stage2Config
from ..kernel_arguments import Stage2Arguments
from ..layout import CHUNK_K, PAIR, SCALES_PAD, TILE_BYTES, TILE_N
from . import ops as ops
from .block import RowBlock, Workgroup, work_of
from .ops import Value
from .weights import READERS

RING_BYTES = 8192


class Stage2(Workgroup):
    """`tile_m` sorted INT8 rows x `tile_n` of the channels `column` .. `column + columns - 1`."""

    blocks: type[RowBlock] = RowBlock
    # Returns what `int8_rows` takes of loads that begin before those of the weights: loads return in order.
    start_rows: Callable[[], tuple[Any, ...]]
    # Returns the parts of each row that this lane multiplies, and the row's low sum.
    int8_rows: Callable[..., list[Any]]

    def __init__(self, cfg: Stage2Config, args: Stage2Arguments) -> None:
        ops.keep(*(value for name, value in vars(args).items() if name != "kept"))
        super().__init__(cfg, args)
        self.columns = args.columns
        part, block, here = fx.block_idx.x, fx.block_idx.y, None
        if cfg.by_xcd:
            part = block
            block, here = work_of(fx.block_idx.x, args.blocks, 1)
        self.block = self.blocks(args, block, args.tokens * cfg.top_k, cfg.top_k, here)
        self.row_tiles, self.steps = cfg.row_tiles, cfg.inter // cfg.tile_k
        self.first_row = self.wave % cfg.waves_m * (16 * self.row_tiles)
        self.out_channel = part * cfg.tile_n + self.wave // cfg.waves_m * (cfg.tiles * TILE_N)
        self.first_channel = args.column + self.out_channel
        self.writes_info, self.later_columns = args.column + part == 0, args.column > 0

    def run(self) -> None:
        with ops.when(self.block.exists()):
            self.open_buffers()
            self.load_rows()
            with ops.when(self.first_row < self.block.rows) if self.cfg.waves_m > 1 else nullcontext():
                self.stream()

    def open_buffers(self) -> None:
        cfg, args = self.cfg, self.args
        self.block.open()
        self.weights = READERS[cfg.weights](args.weights, self.block.expert, cfg.hidden * cfg.inter)
        self.scales = ops.item(args.w_scale, self.block.expert, (cfg.hidden + SCALES_PAD) * 4)
        slots = args.tokens * cfg.top_k
        self.rows = ops.buffer(args.rows, slots * (cfg.inter * 4))
        self.info = ops.buffer(args.row_info, slots * 8)
        self.kept_rows = ops.buffer(args.kept, slots * cfg.inter)
        self.groups = self.block.together(self.first_row, self.row_tiles)
        self.out = ops.buffer(args.out, slots * (self.columns * 2))

    def load_unit(self, base: Value, tile: int, step: int) -> list[Any]:
        """Load one slot of the weight ring, tile_k x 16 channels; in the loop a tile's first slot brings its scales."""
        chunks = self.cfg.tile_k // CHUNK_K
        tile_bytes = self.cfg.inter // CHUNK_K * TILE_BYTES
        at = self.first_channel * (tile_bytes // TILE_N) + (base + tile) * tile_bytes + step * (chunks * TILE_BYTES)
        words: list[Any] = [self.weights.load(self.lane * 16 + c * TILE_BYTES, at) for c in range(chunks)]
        return words if step or not self.rolled else [*words, self.load_scale(base, tile)]

    def load_rows(self) -> None:
        """Start the first weight loads, then gather the rows and their values for the epilogue."""
        cfg = self.cfg
        self.ring = min(max(1, RING_BYTES // (cfg.tile_k * TILE_N // 2)), cfg.tiles * self.steps)
        self.group = max(PAIR, self.ring // self.steps)  # tiles of one turn of the loop over tiles
        self.turns = cfg.tiles // self.group
        self.rolled = cfg.tiles % self.group == 0 and self.turns >= 3
        if not self.rolled:
            self.group, self.turns = cfg.tiles, 1
        row = self.first_row + (self.lane & 15)
        self.slot = [self.block.slot(row + 16 * m) for m in range(self.row_tiles)]
        ahead = self.start_rows()
        self.in_flight = [self.load_unit(fx.Int32(0), *divmod(u, self.steps)) for u in range(self.ring)]
        ops.pin_schedule()
        parts = cfg.inter // 64
        found = self.int8_rows(*ahead)
        rows = [found[m : m + parts + 1] for m in range(0, len(found), parts + 1)]
        self.operands = [[ops.split_rows(part) for part in row[:-1]] for row in rows]
        self.starts = [ops.splat(start, 4) for row in rows for start in self.weights.start(row[-1], cfg.inter)]

    def stream(self) -> None:
        """Compute all tiles of this wave: unrolled when they are few, else in a rolled loop over ring-sized groups."""
        group, turns = self.group, self.turns

        def turn(i: Value, in_flight: list[list[Any]], is_last: bool = False) -> list[list[Any]]:
            base = i * group
            unwritten: list[tuple[list[Any], list[Any]]] = []
            scales: list[Any] = []
            for t in range(group):
                if not self.rolled and t == group - 1:  # earlier, scales would take registers from the weights
                    scales = [self.load_scale(base, s) for s in range(group)]
                in_flight, sums, scale = self.one_tile(base, t, in_flight, group - t if is_last else None)
                if self.rolled:
                    self.write(base, t, sums, scale)
                else:
                    unwritten.append(sums)
            if unwritten:
                ops.pin_schedule()  # all weights are used before anything else is computed
            for t, (sums, scale) in enumerate(zip(unwritten, scales, strict=True)):
                self.write(base, t, sums, scale)
            return in_flight

        turn(fx.Int32(turns - 1), ops.loop(0, turns - 1, self.in_flight, turn), is_last=True)

    def one_tile(
        self, base: Value, tile: int, in_flight: list[list[Any]], tiles_left: int | None
    ) -> tuple[list[list[Any]], tuple[list[Any], list[Any]], Any]:
        """Multiply 16 channels; return (ring, (two sums of each row tile, unpacked weights), scales).

        tiles_left: number of tiles up to the last, when known; it ends the loading ahead.
        """
        acc, tiles = list(self.starts), list[Any]()
        scale = in_flight[0][-1] if self.rolled else None
        for step in range(self.steps):
            chunks = self.cfg.tile_k // CHUNK_K
            words, in_flight = in_flight[0][:chunks], in_flight[1:]
            for c in range(chunks):
                tiles.append(operands := self.weights.unpack(words[c]))
                self.pin()
                more = tiles_left is None or step + self.ring < tiles_left * self.steps
                if more and c == chunks - 1:
                    tiles_on, next_step = divmod(step + self.ring, self.steps)
                    in_flight = [*in_flight, self.load_unit(base, tile + tiles_on, next_step)]
                part = 2 * (step * chunks + c)
                rows = [row[part : part + 2] for row in self.operands]
                acc = self.weights.multiply(operands, rows, acc, self.groups)
        return in_flight, (acc, tiles), scale

    def load_scale(self, base: Value, tile: int) -> Value:
        """Load the weight scales of a lane's four channels of a tile."""
        half = tile % PAIR
        at = (self.first_channel + (base + (tile - half)) * TILE_N) * 4
        return ops.load(self.scales, T.f32x4, (self.lane >> 4) * (PAIR * 16) + half * 16, at)

    def write(self, base: Value, tile: int, sums: tuple[list[Any], list[Any]], scale: Value) -> None:
        """Store the results of a pair of tiles with its second tile, eight channels of one row a lane."""
        half = tile % PAIR
        at = (self.out_channel + (base + (tile - half)) * TILE_N) * 2
        row_bytes, lane_at = self.columns * 2, (self.lane >> 4) * (PAIR * 4 * 2)
        out_at = [slot * row_bytes + lane_at for slot in self.slot]
        words = [ops.elements(ops.to_f16(value)) for value in self.weights.scaled(*sums, scale, self.cfg.inter)]
        if half == 0:
            self.first_half = words
            return
        for m in range(self.row_tiles):
            ops.store(self.out, ops.pack([*self.first_half[m], *words[m]]), out_at[m], at)
