"""Stage 2: the down projection of the routed rows, one float16 row a slot; `rows.build_reduce` sums a token's slots.

K is short (256 at TP 8, 512 at TP 4), so a wave keeps its rows in registers for its whole life and streams weight tiles
past them. A ring of weight registers keeps RING_BYTES of loads in flight. A workgroup quantizes its rows itself, 16
lanes a row, while the first weights are loading; LDS passes them to the waves. In a prefill only the launch for the
first columns quantizes. It also writes the quantized rows, which the other launches load. Rows that a block lacks cost
nothing in prefill, 32 at a time.

A slot's row is acc * (weight scale / its expert's largest), which fits float16 whatever the scales are. Factors that
depend on the slot are multiplied in float32 in the reduction. One launch computes `columns` of the channels: a
prefill's slots are written and read again by chunks that stay in the last-level cache (see backend.py).

Two tiles make one store: channels are packed in pairs of tiles (`layout.PAIR`), so that a lane ends with eight
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith

from . import ops as ops
from .block import RowBlock, ShortBlock, Workgroup, work_of
from .configs import OWN_ROWS, Stage2Config
from .kernel_arguments import Stage2Arguments
from .launcher import launcher
from .layout import CHUNK_K, LOW_K_BIT, PAIR, SCALES_PAD, TILE_BYTES, TILE_N
from .ops import Value
from .rows import quantized, row_scale
from .weights import READERS

RING_BYTES = 8192


class _Workgroup(Workgroup):
    """`tile_m` sorted rows x `tile_n` of the channels `column` .. `column + columns - 1`."""

    def __init__(self, cfg: Stage2Config, args: Stage2Arguments) -> None:
        super().__init__(cfg, args)
        self.columns = args.columns
        part, block, here = fx.block_idx.x, fx.block_idx.y, None
        if cfg.by_xcd:
            part = block
            block, here = work_of(fx.block_idx.x, args.blocks, 1)
        slots = args.tokens * cfg.top_k
        if cfg.short:
            self.block: RowBlock = ShortBlock(args, block, slots, cfg.top_k)
        else:
            self.block = RowBlock(args, block, slots, cfg.top_k, here)
        self.row_tiles, self.steps = cfg.row_tiles, cfg.inter // cfg.tile_k
        self.first_row = self.wave % cfg.waves_m * (16 * self.row_tiles)
        self.out_channel = part * cfg.tile_n + self.wave // cfg.waves_m * (cfg.tiles * TILE_N)
        self.first_channel = args.column + self.out_channel
        self.writes_info, self.later_columns = args.column + part == 0, args.column > 0

    def run(self) -> None:
        """Emit the whole kernel."""
        with ops.when(self.block.exists()):
            self.open_buffers()
            self.load_rows()
            with ops.when(self.first_row < self.block.rows) if self.cfg.waves_m > 1 else nullcontext():
                self.stream()

    def open_buffers(self) -> None:
        """Open the block's tables and buffers."""
        cfg, args = self.cfg, self.args
        self.block.open()
        self.weights = READERS[cfg.weights](args.weights, self.block.expert, cfg.hidden * cfg.inter)
        self.scales = ops.item(args.w_scale, self.block.expert, (cfg.hidden + SCALES_PAD) * 4)
        slots = args.tokens * cfg.top_k
        self.rows = ops.buffer(args.rows, slots * (cfg.inter * 4))
        self.info = ops.buffer(args.row_info, slots * 8)
        self.kept_rows = ops.buffer(args.kept, slots * cfg.inter)
        self.groups = self.block.together(self.first_row, self.row_tiles)
        self.size = 4 if cfg.accumulators else 2  # bytes of a result
        self.out = ops.buffer(args.out, slots * (self.columns * self.size))

    def load_unit(self, base: Value, tile: int, step: int) -> list[Any]:
        """Load one slot of the weight ring, tile_k x 16 channels; in the loop a tile's first slot brings its scales."""
        chunks = self.cfg.tile_k // CHUNK_K
        tile_bytes = self.cfg.inter // CHUNK_K * TILE_BYTES
        at = self.first_channel * (tile_bytes // TILE_N) + (base + tile) * tile_bytes + step * (chunks * TILE_BYTES)
        words: list[Any] = [self.weights.load(self.lane * 16 + c * TILE_BYTES, at) for c in range(chunks)]
        return words if step or not self.rolled else [*words, self.load_scale(base, tile)]

    def load_ahead(self, base: Value, tile: int, step: int) -> list[Any]:
        """Load the slot that follows slot (tile, step) by a ring."""
        tiles, step = divmod(step + self.ring, self.steps)
        return self.load_unit(base, tile + tiles, step)

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
        # Sixteen lanes quantize a row, or a whole wave where a block has only four rows.
        self.share = ops.WAVE if cfg.short else 16
        self.own = self.wave if cfg.short else self.wave * 4 + (self.lane >> 4)
        slots = self.quantized_slots(0) if cfg.quantize and not cfg.keeps else []
        loaded = self.load_own(slots) if cfg.short else []  # before the weights: loads return in order
        self.in_flight = [self.load_unit(fx.Int32(0), *divmod(u, self.steps)) for u in range(self.ring)]
        ops.pin_schedule()
        parts = cfg.inter // 64
        kinds = ([self.v4i] * parts + [ops.i32_type()]) * self.row_tiles
        if cfg.keeps:
            found = ops.choose(self.later_columns, kinds, self.kept_before, lambda: self.quantized_rows([], []))
        else:
            found = self.quantized_rows(slots, loaded) if cfg.quantize else self.kept_before()
        rows = [found[m : m + parts + 1] for m in range(0, len(found), parts + 1)]
        self.operands = [[ops.split_rows(part) for part in row[:-1]] for row in rows]
        self.starts = [ops.splat(start, 4) for row in rows for start in self.weights.start(row[-1], cfg.inter)]

    def kept_before(self) -> list[Any]:
        """Return the parts of each row that this lane multiplies, and the row's low sum, from an earlier launch."""
        found, v2i = [], ops.vec_type(2, ops.i32_type())
        for slot in self.slot:
            at = slot * self.cfg.inter + self.weights.corner(self.lane)
            parts = map(self.weights.part, range(self.cfg.inter // 64))
            found += [ops.load(self.kept_rows, self.v4i, at + part) for part in parts]
            found.append(ops.element(ops.load(self.info, v2i, slot * 8), 1))
        return found

    def quantized_slots(self, start: int) -> list[Any]:
        """Return the slots of the rows that this lane helps to quantize: row tiles from `start` on, for each wave."""
        cfg = self.cfg
        tiles = [w * self.row_tiles + start + i for w in range(cfg.waves_m) for i in range(cfg.quantized_tiles)]
        return [self.block.slot(self.own + 16 * tile) for tile in tiles]

    def quantized_rows(self, slots: list[Any], loaded: list[Any]) -> list[Any]:
        """Quantize rows through LDS, as many row tiles at a time as fit, and return the same as `kept_before`."""
        cfg, at_once = self.cfg, self.cfg.quantized_tiles
        self.lds = ops.lds_alloc(cfg.lds_bytes)
        place, found = self.lane & (OWN_ROWS - 1 if cfg.short else 15), []
        for start in range(0, self.row_tiles, at_once):
            here = slots or self.quantized_slots(start)
            if start:
                ops.barrier()  # the tiles before have been read
            self.quantize_rows(here, loaded or self.load_own(here))
            for i in range(at_once):
                at = (self.wave % cfg.waves_m * (16 * at_once) + 16 * i + place) * cfg.row_bytes
                ends = [at + self.weights.corner(self.lane) + self.weights.part(j) for j in range(cfg.inter // 64)]
                found += [ops.lds_load(self.lds, self.v4i, end) for end in ends]
                found.append(ops.lds_load(self.lds, ops.i32_type(), at + cfg.inter, alignment=4))
        return found

    def load_own(self, slots: list[Any]) -> list[tuple[list[Any], Any, Any]]:
        """Start to load the input of quantizing these slots: values, router weight, the expert's unit."""
        cfg, part = self.cfg, self.lane & (self.share - 1)
        router = ops.buffer(self.args.router, self.args.tokens * (cfg.top_k * 4))
        unit = ops.load(self.scales, ops.f32_type(), fx.Int32(cfg.hidden * 4))
        found = []
        for slot in slots:
            at = [slot * (cfg.inter * 4) + part * 16 + j for j in range(0, cfg.inter * 4, self.share * 16)]
            values = [ops.load(self.rows, self.v4f, offset) for offset in at]
            found.append((values, ops.load(router, ops.f32_type(), slot * 4), unit))
        return found

    def quantize_rows(self, slots: list[Any], loaded: list[tuple[list[Any], Any, Any]]) -> None:
        """Bring rows to LDS as INT8, each followed by its low sum; to places own, own + 16 and so on."""
        cfg, part = self.cfg, self.lane & (self.share - 1)

        def over_row(value: Value, combine: Callable[..., Value]) -> Value:
            distance = self.share // 2
            while distance:
                value, distance = combine(value, ops.from_lane(value, self.lane ^ distance)), distance // 2
            return value

        for m, (slot, (values, weight, unit)) in enumerate(zip(slots, loaded, strict=True)):
            scale, inverse, (grow, shrink) = row_scale(values, over_row)
            words, total = quantized(values, scale, inverse, grow)
            at = (self.own + 16 * m) * cfg.row_bytes
            kept_at = ops.select(self.writes_info, slot * cfg.inter, ops.NOWHERE)
            for j, word in enumerate(words):
                in_row = part * 4 + self.share * 4 * j
                ops.lds_store(self.lds, word, at + in_row, alignment=4)
                if cfg.keeps:
                    ops.store(self.kept_rows, word, kept_at + in_row)
            low = over_row(ops.select((part & (LOW_K_BIT // 4)) != 0, total, 0), arith.addi)
            ops.lds_store(self.lds, low, at + cfg.inter, alignment=4)  # all lanes of the row store the same value
            stored = arith.mulf(arith.mulf(arith.mulf(scale, shrink), weight), unit)
            place = ops.select(ops.both(self.writes_info, part == 0), slot * 8, ops.NOWHERE)
            ops.store(self.info, ops.pack([ops.bitcast(stored, ops.i32_type()), low]), place)
        ops.barrier()

    def stream(self) -> None:
        """Compute all tiles of this wave: unrolled when they are few, else in a rolled loop over ring-sized groups."""
        group, turns = self.group, self.turns

        def turn(i: Value, in_flight: list[list[Any]], is_last: bool = False) -> list[list[Any]]:
            base = i * group
            unwritten: list[list[Any]] = []
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
    ) -> tuple[list[list[Any]], list[Any], Any]:
        """Multiply 16 channels; return (ring, two sums of each row tile, scales).

        tiles_left: number of tiles up to the last, when known; it ends the loading ahead.
        """
        acc = list(self.starts)
        scale = in_flight[0][-1] if self.rolled else None
        for step in range(self.steps):
            chunks = self.cfg.tile_k // CHUNK_K
            words, in_flight = in_flight[0][:chunks], in_flight[1:]
            for c in range(chunks):
                operands = self.weights.unpack(words[c])
                self.pin()
                more = tiles_left is None or step + self.ring < tiles_left * self.steps
                if more and c == chunks - 1:
                    in_flight = [*in_flight, self.load_ahead(base, tile, step)]
                part = 2 * (step * chunks + c)
                for group, here in self.groups:
                    rows = [self.operands[m][part : part + 2] for m in group]
                    multiply = partial(self.weights.multiply, operands, rows)
                    first, last = 2 * group.start, 2 * group.stop
                    acc[first:last] = ops.changed(here, acc[first:last], multiply)
        return in_flight, acc, scale

    def load_scale(self, base: Value, tile: int) -> Value:
        """Load the weight scales of a lane's four channels of a tile."""
        half = tile % PAIR
        at = (self.first_channel + (base + (tile - half)) * TILE_N) * 4
        return ops.load(self.scales, self.v4f, (self.lane >> 4) * (PAIR * 16) + half * 16, at)

    def write(self, base: Value, tile: int, sums: list[Any], scale: Value) -> None:
        """Store the results of a pair of tiles with its second tile, eight channels of one row a lane."""
        half = tile % PAIR
        at = (self.out_channel + (base + (tile - half)) * TILE_N) * self.size
        row_bytes, lane_at = self.columns * self.size, (self.lane >> 4) * (PAIR * 4 * self.size)
        out_at = [slot * row_bytes + lane_at for slot in self.slot]
        exact = [self.weights.float_sum(*both, self.cfg.inter) for both in zip(sums[::2], sums[1::2], strict=True)]
        if self.cfg.accumulators:
            for m in range(self.row_tiles):
                ops.store(self.out, exact[m], out_at[m] + half * 16, at)
            return
        words = [ops.elements(ops.to_f16(arith.mulf(e, scale))) for e in exact]
        if half == 0:
            self.first_half = words
            return
        for m in range(self.row_tiles):
            ops.store(self.out, ops.pack([*self.first_half[m], *words[m]]), out_at[m], at)


def build(cfg: Stage2Config) -> Any:
    """Build the kernel of one configuration, for `toolchain.compiled`."""

    def emit(args: Stage2Arguments) -> None:
        ops.keep(*(value for name, value in vars(args).items() if name != "kept"))
        _Workgroup(cfg, args).run()

    return launcher("moe_stage2", Stage2Arguments, emit)
