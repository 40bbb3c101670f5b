"""Stage 2: the down projection of the routed rows, for decode (one bfloat16 row a slot) and prefill (summed per token).

K is short (256 at TP 8, 512 at TP 4), so a wave keeps its rows in registers for its whole life and streams weight
tiles past them: no LDS, no barrier. A ring of weight registers keeps RING_BYTES of loads in flight.

Decode writes acc * weight_scale for every routed slot; `flydsl_rows.reduce_slots` then scales and sums a token's
slots in a fixed order. Prefill adds float32 atomically into [T, hidden] instead: the bfloat16 slots would be written
and read again, 2.3 GB for 10,240 tokens, and the sum of eight float32 addends differs between orders only far below
bfloat16's precision.

Conversion to float32 costs nothing: accumulators start at the integer whose bits are the float 1.5 * 2**23, so that
their final bits *are* the float 1.5 * 2**23 + sum, exact while |sum| < 2**22 (K <= 512).
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import arith, math

from . import ops as ops
from .block import Arguments, RoutingAddresses, RowBlock
from .configs import WAVES, Stage2Config
from .layout import CHUNK_K, TILE_BYTES, TILE_N

RING_BYTES = 8192
FLOAT_BIAS = 12582912.0  # 1.5 * 2**23
FLOAT_BIAS_BITS = 0x4B400000
BIASED_K = 512  # 16 * 8 * 127 * 512 / 2 < 2**22


class _Workgroup:
    """`tile_m` sorted rows x `tile_n` channels."""

    def __init__(self, cfg: Stage2Config, args: Arguments) -> None:
        self.cfg, self.args = cfg, args
        tid = fx.thread_idx.x
        self.lane = tid & 63
        self.wave = ops.uniform(tid >> 6)
        x, y = fx.block_idx.x, fx.block_idx.y
        self.column, block = (y, x) if cfg.atomic else (x, y)
        self.block = RowBlock(args.routing, block, args.tokens * cfg.top_k, cfg.top_k)
        self.row_tiles, self.steps = cfg.row_tiles, cfg.inter // cfg.tile_k
        self.biased = cfg.inter <= BIASED_K
        self.v4i = ops.vec_type(4, ops.i32_type())
        self.v4f = ops.vec_type(4, ops.f32_type())

    def run(self) -> None:
        """Emit the whole kernel."""
        with ops.when(self.block.exists()):
            self.open_buffers()
            self.load_rows()
            self.stream()

    def open_buffers(self) -> None:
        """The block's tables and buffers, and where this wave's rows and columns start."""
        cfg, args = self.cfg, self.args
        self.block.open()
        expert_bytes = cfg.hidden * cfg.inter // 2
        self.weights = ops.buffer(args.weights, fx.Int32(expert_bytes), fx.Int64(self.block.expert) * expert_bytes)
        self.tile_bytes = cfg.inter // CHUNK_K * TILE_BYTES
        self.first_tile = self.column * (cfg.tile_n // TILE_N) + self.wave // cfg.waves_m * cfg.tiles
        self.first_row = self.wave % cfg.waves_m * (16 * self.row_tiles)
        slots = self.args.tokens * cfg.top_k
        self.rows = ops.buffer(args.rows, slots * cfg.inter)
        self.info = ops.buffer(args.row_info, slots * 8)
        self.scales = ops.buffer(args.w_scale, fx.Int32(cfg.hidden * 4), fx.Int64(self.block.expert) * (cfg.hidden * 4))
        if cfg.atomic:
            self.out = ops.buffer(args.out, args.tokens * (cfg.hidden * 4))
        else:
            self.out = ops.buffer(args.out, slots * (cfg.hidden * (4 if cfg.accumulators else 2)))

    def load_unit(self, tile: Any, step: int) -> list[Any]:
        """One slot of the weight ring, tile_k x 16 channels; in the loop a tile's first slot brings its scales."""
        chunks = self.cfg.tile_k // CHUNK_K
        at = (self.first_tile + tile) * self.tile_bytes + step * (chunks * TILE_BYTES)
        words = [ops.load(self.weights, self.v4i, self.lane * 16 + c * TILE_BYTES, at) for c in range(chunks)]
        return words if step or not self.rolled else [*words, self.load_scale(tile)]

    def load_ahead(self, tile: Any, step: int) -> list[Any]:
        """The slot that follows slot (tile, step) by a ring."""
        tiles, step = divmod(step + self.ring, self.steps)
        return self.load_unit(tile + tiles, step)

    def load_rows(self) -> None:
        """Start the first weight loads, then gather the rows and what the epilogue needs of them."""
        cfg = self.cfg
        self.ring = min(max(1, RING_BYTES // (cfg.tile_k * TILE_N // 2)), cfg.tiles * self.steps)
        self.group = max(1, self.ring // self.steps)  # tiles of one turn of the loop over tiles
        self.turns = cfg.tiles // self.group
        self.rolled = cfg.tiles % self.group == 0 and self.turns >= 3
        if not self.rolled:
            self.group, self.turns = cfg.tiles, 1
        first = [divmod(u, self.steps) for u in range(self.ring)]
        early = [] if cfg.atomic else [self.load_unit(fx.Int32(t), s) for t, s in first]
        row = self.first_row + (self.lane & 15)
        self.slot = [self.block.slot(row + 16 * m) for m in range(self.row_tiles)]
        if cfg.atomic:
            self.result_rows()
        ops.pin_schedule()
        corner = (self.lane >> 4) * 16
        self.operands = []
        for slot in self.slot:
            at = slot * cfg.inter + corner
            parts = [ops.load(self.rows, self.v4i, at + 64 * j) for j in range(cfg.inter // 64)]
            self.operands.append([ops.split_rows(p) for p in parts])
        v2i = ops.vec_type(2, ops.i32_type())
        if not cfg.atomic:
            low = [ops.element(ops.load(self.info, v2i, slot * 8), 1) for slot in self.slot]
            self.low_start = [ops.splat(self.start(x), 4) for x in low]
        self.held = early or [self.load_unit(fx.Int32(t), s) for t, s in first]
        self.zero = ops.splat(ops.const_i32(FLOAT_BIAS_BITS if self.biased else 0), 4)

    def result_rows(self) -> None:
        """Prefill: a lane's results are rows 4g..4g+3 of each tile; their offsets, scales and low sums."""
        cfg = self.cfg
        v2i = ops.vec_type(2, ops.i32_type())
        first = self.first_row + (self.lane >> 4) * 4
        self.row_at, self.row_scale, self.low_start = [], [], []
        for m in range(self.row_tiles):
            slots = [self.block.slot(first + 16 * m + i) for i in range(4)]
            info = [ops.load(self.info, v2i, s * 8) for s in slots]
            self.row_at.append([self.block.token(s) * (cfg.hidden * 4) + (self.lane & 15) * 4 for s in slots])
            self.row_scale.append(ops.bitcast(ops.pack([ops.element(x, 0) for x in info]), self.v4f))
            self.low_start.append(ops.pack([self.start(ops.element(x, 1)) for x in info]))

    def start(self, low_sum: Any) -> Any:
        """Where the low accumulator of a row starts: minus what the offset-binary nibbles add, plus the bias."""
        correction = arith.muli(low_sum, ops.const_i32(-8))
        return arith.addi(correction, ops.const_i32(FLOAT_BIAS_BITS)) if self.biased else correction

    def stream(self) -> None:
        """All tiles of this wave: unrolled when they are few, else in a rolled loop over ring-sized groups."""
        group, turns = self.group, self.turns
        sizes = [len(unit) for unit in self.held]

        def turn(i: Any, flat: list[Any], is_last: bool = False) -> list[Any]:
            items = iter(flat)
            held = [[next(items) for _ in range(size)] for size in sizes]
            unwritten = []
            scales: list[Any] = []
            for t in range(group):
                if not self.rolled and t == group - 1:  # not earlier: they would take the place of weights
                    scales = [self.load_scale(i * group + s) for s in range(group)]
                held, sums, scale = self.one_tile(i * group + t, held, group - t if is_last else None)
                if self.rolled:
                    self.write(i * group + t, sums, scale)
                else:
                    unwritten.append((i * group + t, sums))
            if unwritten:
                ops.pin_schedule()  # all weights are used before anything else is computed
            for (tile, sums), scale in zip(unwritten, scales, strict=True):
                self.write(tile, sums, scale)
            return [x for unit in held for x in unit]

        flat = ops.loop(0, turns - 1, [x for unit in self.held for x in unit], turn)
        turn(fx.Int32(turns - 1), flat, is_last=True)

    def one_tile(
        self, tile: Any, held: list[list[Any]], tiles_left: int | None
    ) -> tuple[list[list[Any]], list[Any], Any]:
        """Multiply 16 channels: (ring, high and low sums of each row tile, scales).

        tiles_left: tiles up to the last, when known; ends the loading ahead.
        """
        acc = [[self.zero, self.low_start[m]] for m in range(self.row_tiles)]
        scale = held[0][-1] if self.rolled else None
        for step in range(self.steps):
            chunks = self.cfg.tile_k // CHUNK_K
            words, held = held[0][:chunks], held[1:]
            for c in range(chunks):
                operands = ops.unpack_weights(words[c])
                if self.cfg.pinned:
                    ops.pin_schedule()
                more = tiles_left is None or step + self.ring < tiles_left * self.steps
                if more and c == chunks - 1:
                    held = [*held, self.load_ahead(tile, step)]
                first = 2 * (step * chunks + c)
                for m in range(self.row_tiles):
                    rows = self.operands[m][first : first + 2]
                    for (high, low), (row_high, row_low) in zip(operands, rows, strict=True):
                        acc[m][0] = self.multiply(high, row_high, acc[m][0])
                        acc[m][1] = self.multiply(low, row_low, acc[m][1])
        return held, acc, scale

    def multiply(self, weights: Any, rows: Any, acc: Any) -> Any:
        """Decode wants channels along a lane's four results, prefill (coalesced atomics) channels along lanes."""
        return ops.mfma_i8(rows, weights, acc) if self.cfg.atomic else ops.mfma_i8(weights, rows, acc)

    def load_scale(self, tile: Any) -> Any:
        """Weight scales of a lane's results, one per channel: four in decode, one in prefill."""
        at = (self.first_tile + tile) * (TILE_N * 4)
        if self.cfg.atomic:
            return ops.load(self.scales, ops.f32_type(), (self.lane & 15) * 4, at)
        return ops.load(self.scales, self.v4f, (self.lane >> 4) * 16, at)

    def exact(self, high: Any, low: Any) -> Any:
        """high / 16 + low as float32, exact."""
        if not self.biased:
            return arith.sitofp(self.v4f, arith.addi(arith.shrsi(high, ops.splat(ops.const_i32(4), 4)), low))
        sixteenth = ops.splat(ops.const_f32(1 / 16), 4)
        both = math.fma(ops.bitcast(high, self.v4f), sixteenth, ops.bitcast(low, self.v4f))
        return arith.addf(both, ops.splat(ops.const_f32(-FLOAT_BIAS * 17 / 16), 4))

    def write(self, tile: Any, sums: list[Any], scale: Any) -> None:
        """Decode: 4 channels of one row a lane. Prefill: one channel of 4 rows, 64 contiguous bytes a row."""
        cfg = self.cfg
        channel = (self.first_tile + tile) * TILE_N
        for m in range(self.row_tiles):
            exact = self.exact(*sums[m])
            if cfg.atomic:
                scaled = arith.mulf(arith.mulf(exact, ops.splat(scale, 4)), self.row_scale[m])
                for value, at in zip(ops.elements(scaled), self.row_at[m], strict=True):
                    ops.atomic_add_f32(self.out, value, at, channel * 4)
                continue
            size = 4 if cfg.accumulators else 2
            value = exact if cfg.accumulators else ops.to_bf16(arith.mulf(exact, scale))
            at = self.slot[m] * (cfg.hidden * size) + (self.lane >> 4) * (4 * size)
            ops.store(self.out, value, at, channel * size)


def build(cfg: Stage2Config) -> Any:
    """The kernel of one configuration, for `toolchain.compiled`: (ten addresses, tokens)."""

    @flyc.kernel(known_block_size=[WAVES * ops.WAVE, 1, 1])
    def moe_stage2(
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
        routing = RoutingAddresses(order, block_expert, block_first, block_rows, num_blocks)
        _Workgroup(cfg, Arguments(rows, row_info, weights, w_scale, routing, out, tokens)).run()

    return ops.launcher(moe_stage2)
