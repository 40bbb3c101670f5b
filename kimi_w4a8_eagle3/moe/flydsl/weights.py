"""Reading and multiplication of an expert's packed weights (layout.py) in the kernels, by format.

Every 16-row tile of results has two accumulators: INT4's are of high and of low nibbles, MXFP4's of blocks with large
and with small shifts. Unpacked weights and rows are lists of pairs of MFMA operands, eight k of a lane each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flydsl.expr as fx
from flydsl.expr import arith, math
from flydsl.expr.rocdl import perm_b32
from flydsl.expr.typing import T

from ...quark.weight_format import INT4, MXFP4, WeightFormat
from . import ops as ops
from .layout import NO_SECOND, packed_bytes
from .ops import Value

FLOAT_BIAS = 12582912.0  # 1.5 * 2**23
FLOAT_BIAS_BITS = 0x4B400000
Rows = list[tuple[Any, Any]]  # one row of each lane, 16 bytes an element


class Int4:
    """One expert's INT4 weights: `sum = high / 16 + low - 8 * low_sum`."""

    format = INT4
    lane_k = 16  # consecutive k of a row that a lane multiplies
    biased_k = 512  # 16 * 8 * 127 * 512 / 2 < 2**22

    def __init__(self, address: Value, expert: Value, count: int, there: Value | None = None) -> None:
        """Open the buffer of an expert with `count` weights; it is empty unless `there`."""
        size = packed_bytes(self.format, count)
        self.words = ops.item(address, expert, size, there)

    @classmethod
    def part(cls, number: int) -> int:
        """Return where part `number` of a lane's row begins; `corner` is that of part 0."""
        per_lane = cls.lane_k // 16
        return number // per_lane * 4 * cls.lane_k + number % per_lane * 16

    @classmethod
    def corner(cls, lane: Value) -> Value:
        return (lane >> 4) * cls.lane_k

    def load(self, lane_at: Value, at: Value) -> list[Any]:
        """Load 16 channels x 128 k, the tile at byte lane_at + at of the codes."""
        return [ops.load(self.words, T.i32x4, lane_at, at)]

    @staticmethod
    def unpack(loaded: list[Any]) -> Any:
        """Unpack a tile to pairs (16 * weight, weight + 8); two operations per eight weights."""
        words = ops.elements(loaded[0])
        high = [arith.andi(w, ops.const_i32(0xF0F0F0F0)) for w in words]
        low = [arith.andi(w, ops.const_i32(0x0F0F0F0F)) for w in words]
        return [(ops.pack(high[i : i + 2]), ops.pack(low[i : i + 2])) for i in (0, 2)]

    @staticmethod
    def multiply(tile: Any, rows: Sequence[Rows], sums: list[Any]) -> list[Any]:
        """Return both sums of some row tiles, each plus an unpacked tile times its rows."""
        for k, both in enumerate(tile):
            for n, total in enumerate(sums):
                sums[n] = ops.mfma_i8(both[n % 2], rows[n // 2][k][n % 2], total)
        return sums

    @staticmethod
    def total(first: Value, second: Value) -> Value:
        """Return the sum of both accumulators, plus `offset`."""
        return arith.addi(arith.shrsi(first, ops.splat(ops.const_i32(4), 4)), second)

    @staticmethod
    def offset(low_sum: Value) -> Value:
        """Return what a row's `total` has too much."""
        return ops.splat(arith.muli(low_sum, ops.const_i32(8)), 4)

    # Where K is short, accumulators start at the integer whose bits are the float 1.5 * 2**23. Their final bits are
    # then the float 1.5 * 2**23 + sum, exact while |sum| < 2**22, and the conversion to float32 costs nothing.
    @classmethod
    def start(cls, low_sum: Value, k: int) -> tuple[Any, Any]:
        """Return the start values of a row's two accumulators for `float_sum`."""
        bias, correction = cls.bias(k), arith.muli(low_sum, ops.const_i32(-8))
        low = arith.addi(correction, ops.const_i32(bias)) if bias else correction
        return ops.const_i32(bias), low

    @classmethod
    def bias(cls, k: int) -> int:
        return FLOAT_BIAS_BITS if k <= cls.biased_k else 0

    @classmethod
    def float_sum(cls, first: Value, second: Value, k: int) -> Value:
        """Return the accumulator as float32, rounded once."""
        if not cls.bias(k):
            return arith.sitofp(T.f32x4, cls.total(first, second))
        sixteenth = ops.splat(ops.const_f32(1 / 16), 4)
        both = math.fma(ops.bitcast(first, T.f32x4), sixteenth, ops.bitcast(second, T.f32x4))
        return arith.addf(both, ops.splat(ops.const_f32(-FLOAT_BIAS * 17 / 16), 4))


class _MxTile(NamedTuple):
    operands: list[tuple[Any, Any]]
    loaded: list[Any]
    has_second: Value


class Mxfp4(Int4):
    """One expert's MXFP4 weights: `sum = 16 * first + second`."""

    format = MXFP4
    lane_k = 32  # one block
    biased_k = 256  # 96 * 127 * 256 < 2**22

    def __init__(self, address: Value, expert: Value, count: int, there: Value | None = None) -> None:
        super().__init__(address, expert, count, there)
        size = packed_bytes(self.format, count)
        self.shifts = ops.item(address, expert, size, there, part=(count // 2, count // 32))

    def load(self, lane_at: Value, at: Value) -> list[Any]:
        """Load 16 channels x 128 k and, one byte for a lane's 16 bytes of codes, the shifts of its block."""
        shifts = ops.load(self.shifts, T.i8, lane_at >> 4, at >> 4)
        return [*super().load(lane_at, at), arith.extui(T.i32, shifts)]

    @staticmethod
    def unpack(loaded: list[Any]) -> _MxTile:
        """Unpack a tile to operands of the first sums."""
        shift = loaded[1]
        second = arith.cmpi(arith.CmpIPredicate.ult, shift, ops.const_i32(NO_SECOND))
        return _MxTile(_shifted(loaded[0], shift), loaded, fx.Int64(ops.ballot(second)) != 0)

    @staticmethod
    def multiply(tile: Any, rows: Sequence[Rows], sums: list[Any]) -> list[Any]:
        """See Int4. A tile without small shifts leaves out the second sums."""
        words, shift = tile.loaded

        def second(sums: list[Any]) -> list[Any]:
            small = arith.shrsi(arith.shli(shift, ops.const_i32(24)), ops.const_i32(29))
            again = ops.pack([ops.again(word) for word in ops.elements(words)])
            return _products(_shifted(again, small), rows, sums)

        firsts = _products(tile.operands, rows, sums[::2])
        seconds = ops.changed(tile.has_second, sums[1::2], second)
        return [total for both in zip(firsts, seconds, strict=True) for total in both]

    @staticmethod
    def total(first: Value, second: Value) -> Value:
        return arith.addi(arith.shli(first, ops.splat(ops.const_i32(4), 4)), second)

    @staticmethod
    def offset(low_sum: Value) -> Value:
        return ops.splat(ops.const_i32(0), 4)

    @classmethod
    def start(cls, low_sum: Value, k: int) -> tuple[Any, Any]:
        start = ops.const_i32(cls.bias(k))
        return start, start

    @classmethod
    def float_sum(cls, first: Value, second: Value, k: int) -> Value:
        if not cls.bias(k):
            return arith.sitofp(T.f32x4, cls.total(first, second))
        bias = ops.splat(ops.const_f32(-FLOAT_BIAS), 4)
        parts = [arith.addf(ops.bitcast(part, T.f32x4), bias) for part in (first, second)]
        return math.fma(parts[0], ops.splat(ops.const_f32(16), 4), parts[1])


def _products(tile: list[tuple[Any, Any]], rows: Sequence[Rows], sums: list[Any]) -> list[Any]:
    for k, both in enumerate(tile):
        for half in (0, 1):
            sums = [ops.mfma_i8(both[half], row[k][half], total) for row, total in zip(rows, sums, strict=True)]
    return sums


def _shifted(words: Value, shift: Value) -> list[tuple[Any, Any]]:
    """Return the INT8 of 32 codes, each shifted left; a shift of 31 clears them.

    A code's low three bits number a value of layout.PAIRS. Its high bit is 0 for that value XOR 0xFC.
    """
    by = arith.andi(shift, ops.const_i32(31))
    low, high, other = (arith.shli(ops.const_i32(table), by) for table in (0x03020100, 0x0C080604, 0xFC))

    def values(codes: Value) -> Value:
        number = arith.andi(codes, ops.const_i32(0x07070707))
        half = arith.andi(codes, ops.const_i32(0x08080808))  # selects byte 0, or the sign of byte 1, which is 0
        return arith.xori(perm_b32(high, low, number), perm_b32(other, other, half))

    ones = ops.elements(words)
    firsts = [values(arith.shrui(word, ops.const_i32(4))) for word in ones]
    seconds = [values(word) for word in ones]
    return [(ops.pack(firsts[i : i + 2]), ops.pack(seconds[i : i + 2])) for i in (0, 2)]


READERS: dict[WeightFormat, type[Int4]] = {reader.format: reader for reader in (Int4, Mxfp4)}
