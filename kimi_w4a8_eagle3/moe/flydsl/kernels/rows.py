"""Row kernels around the two stages: INT8 quantization of rows and the sum over a token's slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith, math
from flydsl.expr.rocdl import perm_b32
from flydsl.expr.typing import T

from ..configs import REDUCED, WAVES, QuantizeConfig
from ..layout import LOW_K_BIT
from . import ops as ops
from .block import Workgroup
from .ops import Value

INF_BITS = 0x7F800000
TINY_BITS = 0x21800000  # of 2**-60: rows below it are scaled up first, so that the reciprocal stays finite
GROW = 2.0**64
VALUES = 4  # consecutive values of a lane
EXCHANGE = 2 * 16 * WAVES


def is_expert(number: Value, experts: int) -> Value:
    """Return the i1 0 <= number < experts, by one unsigned comparison."""
    return arith.cmpi(arith.CmpIPredicate.ult, number.ir_value(), ops.const_i32(experts))


def over_lanes(value: Value, combine: Callable[..., Value], lane: Value, count: int) -> Value:
    """Combine an i32 over each `count` lanes of a wave."""
    while count > 1:
        count //= 2
        value = combine(value, ops.from_lane(value, lane ^ count))
    return value


def row_scale(values: list[Any], over_row: Callable[..., Value]) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return (scale of the grown values, its inverse, (factor that grows values, factor that shrinks the scale back)).

    values: float32 vectors. over_row(value, combine): combines an i32 over all lanes of the row.
    """
    largest = None
    for vector in values:
        for v in ops.elements(vector):
            bits = arith.andi(ops.bitcast(v, T.i32), ops.const_i32(0x7FFFFFFF))
            largest = bits if largest is None else arith.maxsi(largest, bits)
    largest = over_row(largest, arith.maxsi)  # as integers: NaN is larger than all numbers
    tiny = arith.cmpi(arith.CmpIPredicate.slt, largest, ops.const_i32(TINY_BITS))
    grow = arith.select(tiny, ops.const_f32(GROW), ops.const_f32(1.0))
    shrink = arith.select(tiny, ops.const_f32(1 / GROW), ops.const_f32(1.0))
    top = arith.mulf(ops.bitcast(largest, T.f32), grow)
    scale = ops.divide(top, ops.const_f32(127.0), ops.const_f32(1 / 127))
    scale = arith.select(arith.cmpi(arith.CmpIPredicate.eq, largest, ops.const_i32(0)), grow, scale)
    broken = arith.cmpi(arith.CmpIPredicate.sge, largest, ops.const_i32(INF_BITS))
    scale = arith.select(broken, ops.bitcast(ops.const_i32(ops.NAN_BITS), T.f32), scale)
    return scale, ops.reciprocal(scale), (grow, shrink)


def quantized(values: list[Any], scale: Value, inverse: Value, grow: Value) -> tuple[list[Any], Any]:
    """Return (four int8 of each vector in an i32, the sum of all of them): round_half_even(value / scale)."""
    words, total = [], None
    for vector in values:
        bits = []
        for value in ops.elements(vector):
            quotient = ops.divide(arith.mulf(value, grow), scale, inverse)
            bits.append(ops.bitcast(arith.addf(quotient, ops.const_f32(ops.FLOAT_BIAS)), T.i32))
        pairs = [perm_b32(bits[i + 1], bits[i], ops.const_i32(0x0C0C0400)) for i in (0, 2)]
        words.append(perm_b32(pairs[1], pairs[0], ops.const_i32(0x05040100)))  # the low bytes, first byte lowest
        four = arith.addi(arith.addi(bits[0], bits[1]), arith.addi(bits[2], bits[3]))
        total = four if total is None else arith.addi(total, four)
    biases = ops.const_i32(VALUES * len(values) * ops.FLOAT_BIAS_BITS & 0xFFFFFFFF)
    return words, arith.subi(total, biases)


class Quantize:
    """Quantize one row: a8 = round_half_even(x / scale), scale = max|x| / 127 (zero row: 1, not finite: NaN)."""

    def __init__(self, cfg: QuantizeConfig, row: Value, x: Value, lds: Value) -> None:
        """row: its number in x. lds: EXCHANGE bytes, needed where a whole workgroup takes one row."""
        self.cfg, self.row, self.x, self.lds = cfg, row, x, lds
        self.lane, self.wave = fx.thread_idx.x & 63, ops.uniform(fx.thread_idx.x >> 6)
        self.first = (fx.thread_idx.x if cfg.waves_per_row > 1 else self.lane) * VALUES
        self.step = 64 * cfg.waves_per_row * VALUES

    def column_offsets(self, size: int) -> list[Any]:
        """Return the byte offset of each group of this lane in its row; beyond the row it lies past the buffer."""
        offsets = []
        for start in range(0, self.cfg.columns, self.step):
            column = self.first + start
            if start + self.step > self.cfg.columns:
                column = ops.select(column < self.cfg.columns, column, 1 << 28)
            offsets.append(column * size)
        return offsets

    def load(self, there: Value | None = None) -> list[Any]:
        """Start to load all values of this lane; they are zero past the end of the row and unless `there`."""
        size, kind = (2, T.i32x2) if self.cfg.bf16 else (4, T.f32x4)
        source = ops.item(self.x, self.row, self.cfg.columns * size, there)
        return [ops.load(source, kind, at) for at in self.column_offsets(size)]

    def quantize(self, loaded: list[Any]) -> tuple[list[Any], Any, Any]:
        """Return (four INT8 of each group in an i32, the row's scale, the groups' sum of this lane)."""
        values = loaded
        if self.cfg.bf16:
            values = [ops.bitcast(ops.pack(ops.bf16_bits(pair)), T.f32x4) for pair in loaded]
        scale, inverse, (grow, shrink) = row_scale(values, partial(self.over_row, slot=0))
        words, total = quantized(values, scale, inverse, grow)
        return words, arith.mulf(scale, shrink), total

    def low_sum(self, total: Value) -> Value:
        """Sum the row's INT8 at the k whose weights sit in low nibbles."""
        return self.over_row(ops.select((self.first & LOW_K_BIT) != 0, total, 0), arith.addi, slot=1)

    def over_row(self, value: Value, combine: Callable[..., Value], slot: int) -> Value:
        """Combine an i32 over all lanes of the row."""
        value = over_lanes(value, combine, self.lane, ops.WAVE)
        if self.cfg.waves_per_row == 1:
            return value
        first = slot * 16 * WAVES  # each exchange has its own place, so no wave overwrites what another still reads
        ops.lds_store(self.lds, ops.splat(value, 4), self.wave * 16 + first)
        ops.barrier()
        parts = [ops.lds_load(self.lds, T.i32x4, fx.Int32(first + 16 * w)) for w in range(WAVES)]
        value = ops.element(parts[0], 0)
        for part in parts[1:]:
            value = combine(value, ops.element(part, 0))
        return value


class Reduce(Workgroup):
    """One wave of the reduction, 512 columns of a token; a slot whose expert id is not in range counts as zero."""

    def run(self) -> None:
        cfg, args = self.cfg, self.args
        token = fx.block_idx.y * WAVES + self.wave
        at = (fx.block_idx.x * REDUCED + self.lane * 8) * 2
        with ops.when(token < args.tokens):
            total = [ops.const_f32(0.0)] * 8
            row_bytes = args.columns * 2
            for s in range(cfg.top_k):
                slot = token * cfg.top_k + s
                routed = is_expert(ops.scalar_load(args.ids, slot), cfg.experts)
                size = [ops.select(routed, n, 0) for n in (row_bytes, fx.Int32(8))]
                row = ops.buffer(args.slots, size[0], fx.Int64(slot) * fx.Int64(row_bytes))  # empty: not routed
                scale = ops.load(ops.buffer(args.info, size[1], fx.Int64(slot) * 8), T.f32, fx.Int32(0))
                words = ops.load(row, T.i32x4, at)
                total = self.add(words, scale, total)
            out = ops.buffer(args.out, row_bytes, (fx.Int64(token) * cfg.hidden + fx.Int64(args.column)) * 2)
            ops.store(out, ops.to_bf16(ops.pack(total)), at)

    def add(self, words: Value, scale: Value, total: list[Any]) -> list[Any]:
        """Return total + scale * the eight values of `words`."""
        if self.cfg.bf16:
            values = [ops.bitcast(bits, T.f32) for bits in ops.bf16_bits(words)]
            return [math.fma(v, scale, t) for v, t in zip(values, total, strict=True)]
        halves = [(word, high) for word in ops.elements(words) for high in (False, True)]
        return [ops.fma_f16(*half, scale, t) for half, t in zip(halves, total, strict=True)]
