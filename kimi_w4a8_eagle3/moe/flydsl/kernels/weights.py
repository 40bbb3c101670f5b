"""Reading and multiplication of an expert's packed weights (layout.py) in the kernels, by format.

Every 16-row tile of results has two accumulators, of INT4's high and low nibbles; MXFP4 uses the first one. Unpacked
weights and rows are lists of pairs of MFMA operands, eight k of a lane each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith, math
from flydsl.expr.rocdl import perm_b32
from flydsl.expr.typing import T

from ....quark.weight_format import INT4, MXFP4, WeightFormat
from ..layout import FAR, NEAR, PAIRS, REST, packed_bytes
from . import ops as ops
from .ops import Value

TABLE = int.from_bytes(PAIRS, "little")
Rows = list[tuple[Any, Any]]  # one row of each lane, 16 bytes an element
Spans = Sequence[tuple[range, Any]]  # row tiles, with the condition that they exist
ALL: Spans = ()


class Int4:
    """One expert's INT4 weights: `sum = high / 16 + low - 8 * low_sum`."""

    format = INT4
    lane_k = 16  # consecutive k of a row that a lane multiplies
    biased_k = 512  # 16 * 8 * 127 * 512 / 2 < 2**22
    surplus = 8  # of the weights in low nibbles

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
    def multiply(tile: Any, rows: list[Rows], sums: list[Any], groups: Spans = ALL) -> list[Any]:
        """Return both sums of all row tiles, each plus an unpacked tile times its rows; see `RowBlock.together`."""

        def product(rows: list[Rows], sums: list[Any]) -> list[Any]:
            for k, both in enumerate(tile):
                for n, total in enumerate(sums):
                    sums[n] = ops.mfma_i8(both[n % 2], rows[n // 2][k][n % 2], total)
            return sums

        return _by_group(product, rows, sums, groups, 2)

    @staticmethod
    def total(first: Value, second: Value) -> Value:
        """Return the sum of both accumulators, plus `offset`."""
        return arith.addi(arith.shrsi(first, ops.splat(ops.const_i32(4), 4)), second)

    @classmethod
    def offset(cls, low_sum: Value) -> Value:
        """Return what a row's `total` has too much."""
        return ops.splat(arith.muli(low_sum, ops.const_i32(cls.surplus)), 4)

    # Where K is short, accumulators start at the integer whose bits are the float 1.5 * 2**23. Their final bits are
    # then the float 1.5 * 2**23 + sum, exact while |sum| < 2**22, and the conversion to float32 costs nothing.
    @classmethod
    def start(cls, low_sum: Value, k: int) -> tuple[Any, Any]:
        """Return the start values of a row's two accumulators for `scaled`."""
        bias, correction = cls.bias(k), arith.muli(low_sum, ops.const_i32(-cls.surplus))
        low = arith.addi(correction, ops.const_i32(bias)) if bias else correction
        return ops.const_i32(bias), low

    @classmethod
    def bias(cls, k: int) -> int:
        return ops.FLOAT_BIAS_BITS if k <= cls.biased_k else 0

    @classmethod
    def scaled(cls, sums: list[Any], tiles: list[Any], scale: Value, k: int) -> Iterable[Any]:
        """Return the row tiles' accumulators as float32, rounded once, times `scale`; tiles: the unpacked weights."""
        exact, sixteenth = list[Any](), ops.splat(ops.const_f32(1 / 16), 4)
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            if not cls.bias(k):
                exact.append(arith.sitofp(T.f32x4, cls.total(first, second)))
                continue
            both = math.fma(ops.bitcast(first, T.f32x4), sixteenth, ops.bitcast(second, T.f32x4))
            exact.append(arith.addf(both, ops.splat(ops.const_f32(-ops.FLOAT_BIAS * 17 / 16), 4)))
        return (arith.mulf(e, scale) for e in exact)


class Mxfp4(Int4):
    """One expert's MXFP4 weights; the second accumulators stay at their start."""

    format = MXFP4
    lane_k = 32  # one block
    biased_k = 256  # 96 * 127 * 256 < 2**22
    surplus = 0

    def __init__(self, address: Value, expert: Value, count: int, there: Value | None = None) -> None:
        super().__init__(address, expert, count, there)
        size = packed_bytes(self.format, count)
        self.shifts = ops.item(address, expert, size, there, part=(count // 2, count // 32))

    def load(self, lane_at: Value, at: Value) -> list[Any]:
        """Load 16 channels x 128 k and, one byte for a lane's 16 bytes of codes, the shifts of its block."""
        shifts = ops.load(self.shifts, T.i8, lane_at >> 4, at >> 4)
        return [*super().load(lane_at, at), arith.extui(T.i32, shifts)]

    @staticmethod
    def unpack(loaded: list[Any]) -> Any:
        """Unpack a tile to (its operands, `loaded`, true if some block has a shift above 3)."""
        wide = ops.ballot(arith.cmpi(arith.CmpIPredicate.uge, loaded[1], ops.const_i32(NEAR)))
        return _shifted(*loaded), loaded, ops.raw(fx.Int64(wide) != 0)

    @staticmethod
    def multiply(tile: Any, rows: list[Rows], sums: list[Any], groups: Spans = ALL) -> list[Any]:
        """See Int4. Products with large shifts are summed alone, shifted and added."""
        (operands, (codes, shift), is_wide), firsts = tile, sums[::2]

        def wide(shift: Value) -> list[Any]:
            shift = ops.again(shift)
            ops.pin_schedule()
            channel = (fx.thread_idx.x >> 4 & 3) * 4  # of the first sum of a lane
            rest = ops.pack([arith.shrui(ops.from_lane(shift, channel + i), ops.const_i32(REST)) for i in range(4)])
            totals = _by_group(partial(_added, operands, rest), rows, list(firsts), groups)
            shift = ops.again(shift)
            far = [
                arith.cmpi(arith.CmpIPredicate.uge, arith.andi(shift, ops.const_i32(63)), ops.const_i32(c))
                for c in (FAR, FAR + 4)
            ]
            levels = sum((ops.select(fx.Int64(ops.ballot(f)) != 0, fx.Int32(1), 0) for f in far), fx.Int32(0))
            return ops.loop(0, levels, totals, partial(above, shift, rest))

        def above(shift: Value, rest: Value, level: fx.Int32, totals: list[Any]) -> list[Any]:
            kind = arith.andi(ops.again(shift), ops.const_i32(FAR + 4))
            here = arith.cmpi(arith.CmpIPredicate.eq, kind, ops.raw(level * 4 + FAR))
            own = arith.select(here, arith.andi(shift, ops.const_i32(3)), ops.const_i32(FAR))
            words = ops.pack([ops.again(word) for word in ops.elements(codes)])
            by = arith.addi(rest, ops.splat(level * 4 + 4, 4))
            return _by_group(partial(_added, _shifted(words, own), by), rows, totals, groups)

        near = partial(_by_group, partial(_products, operands), rows, list(firsts), groups)
        firsts = ops.choose(is_wide, [ops.raw(total).type for total in firsts], partial(wide, shift), near)
        return [total for both in zip(firsts, sums[1::2], strict=True) for total in both]

    @staticmethod
    def total(first: Value, second: Value) -> Value:
        return first

    @classmethod
    def scaled(cls, sums: list[Any], tiles: list[Any], scale: Value, k: int) -> Iterable[Any]:
        """See Int4. Large shifts exceed the float that holds the start; a scale is a power of two."""

        def whole() -> list[Any]:
            start = ops.again(ops.const_i32(cls.bias(k)))
            ops.pin_schedule()
            exact = [arith.subi(total, ops.splat(start, 4)) for total in sums[::2]]
            return [arith.mulf(arith.sitofp(T.f32x4, e), scale) for e in exact]

        def near() -> list[Any]:
            bias = arith.mulf(scale, ops.splat(ops.const_f32(-ops.FLOAT_BIAS), 4))
            return [math.fma(ops.bitcast(total, T.f32x4), scale, bias) for total in sums[::2]]

        if not cls.bias(k):
            return [arith.mulf(arith.sitofp(T.f32x4, total), scale) for total in sums[::2]]
        return ops.choose(reduce(arith.ori, [tile[2] for tile in tiles]), [T.f32x4] * len(sums[::2]), whole, near)


def _by_group(change: Callable[..., list[Any]], rows: list[Rows], sums: list[Any], groups: Spans, of: int = 1) -> Any:
    """Return change(rows, sums) of each group of row tiles that exists; of: sums of a row tile."""
    for group, here in groups or [(range(len(rows)), None)]:
        part = slice(of * group.start, of * group.stop)
        sums[part] = ops.changed(here, sums[part], partial(change, rows[group.start : group.stop]))
    return sums


def _products(tile: list[tuple[Any, Any]], rows: list[Rows], sums: list[Any]) -> list[Any]:
    for k, both in enumerate(tile):
        for half in (0, 1):
            sums = [ops.mfma_i8(both[half], row[k][half], total) for row, total in zip(rows, sums, strict=True)]
    return sums


def _added(tile: list[tuple[Any, Any]], by: Value, rows: list[Rows], sums: list[Any]) -> list[Any]:
    """Return sums + (the tile's products << by)."""
    alone = _products(tile, rows, [ops.splat(ops.const_i32(0), 4)] * len(sums))
    return [arith.addi(total, arith.shli(product, by)) for total, product in zip(sums, alone, strict=True)]


def _shifted(words: Value, shift: Value) -> list[tuple[Any, Any]]:
    """Return the INT8 of 32 codes, each shifted left by 0 to 3; a shift with the bit FAR clears them.

    A code's low three bits number a value of layout.PAIRS. Its high bit is 0 for that value XOR 0xFC.
    """
    by = arith.extui(T.i64, arith.andi(shift, ops.const_i32(63)))
    low, high = ops.elements(ops.bitcast(arith.shli(arith.constant(TABLE, type=T.i64), by), T.i32x2))
    other = arith.shli(ops.const_i32(0xFC), arith.andi(shift, ops.const_i32(31)))

    def values(codes: Value) -> Value:
        number = arith.andi(codes, ops.const_i32(0x07070707))
        half = arith.andi(codes, ops.const_i32(0x08080808))  # selects byte 0, or the sign of byte 1, which is 0
        return arith.xori(perm_b32(high, low, number), perm_b32(other, other, half))

    ones = ops.elements(words)
    pairs = [ops.bitcast(ops.pack(ones[i : i + 2]), T.i64) for i in (0, 2)]
    fours = [arith.shrui(pair, arith.constant(4, type=T.i64)) for pair in pairs]
    firsts = [values(word) for pair in fours for word in ops.elements(ops.bitcast(pair, T.i32x2))]
    seconds = [values(word) for word in ones]
    return [(ops.pack(firsts[i : i + 2]), ops.pack(seconds[i : i + 2])) for i in (0, 2)]


READERS: dict[WeightFormat, type[Int4]] = {reader.format: reader for reader in (Int4, Mxfp4)}
