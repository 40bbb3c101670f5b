"""One workgroup: its lanes, its expert, and the routed slot of each of its rows, as `sort_slots.py` sorted them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.typing import T

from ..configs import TOGETHER, XCDS
from ..kernel_arguments import Routed
from ..layout import CHUNK_K, TILE_BYTES, TILE_N
from . import ops as ops
from .ops import State, Value
from .weights import READERS


def work_of(number: Value, blocks: Value, parts: int) -> tuple[fx.Int32, Any]:
    """Return (piece of work of a launch's workgroup `number`, true if there is one), with neighbours on one XCD.

    Workgroups go round the XCDs by their number, and each XCD gets an equal run of the pieces, `parts` of a block.
    """
    total = ops.scalar_load(blocks, fx.Int32(3)) * parts
    xcd, share, more = number & (XCDS - 1), total >> 3, total & (XCDS - 1)
    longer = fx.Int32(arith.minsi(ops.raw(xcd), ops.raw(more)))
    here = number < total
    return ops.select(here, xcd * share + longer + (number >> 3), 0), here


class RowBlock:
    """Block number `block` of the routing, with `rows` rows.

    `slots` is T * top_k. A row that does not exist gets it as its slot number: its offsets lie past the end of every
    per-slot and per-token buffer, where the hardware loads 0 and drops stores.
    here: true if the workgroup has a block (`work_of`).
    """

    def __init__(self, routing: Routed, block: Value, slots: Value, top_k: int, here: Value = None) -> None:
        self._routing, self.slots, self._top_k, self._here = routing, slots, top_k, here
        self.expert, self._first, self.rows, _ = ops.scalar_loads(routing.blocks, block * 4, 4, alignment=16)

    def exists(self) -> Value:
        """True if the block is used: the grid is a static bound."""
        return self.rows > 0 if self._here is None else self._here

    def open(self) -> None:
        """Open the order table; call it only where the block exists."""
        self._order = ops.buffer(self._routing.order, self.rows * 4, fx.Int64(self._first) * 4)

    def together(self, first: Value, tiles: int) -> list[tuple[range, Any]]:
        """Return a wave's row tiles from row `first` on, TOGETHER at a time, each with the condition that they exist.

        The first group always exists and has None.
        """
        groups = [range(m, min(m + TOGETHER, tiles)) for m in range(0, tiles, TOGETHER)]
        return [(g, first + 16 * g.start < self.rows if g.start else None) for g in groups]

    def slot(self, row: Value) -> fx.Int32:
        """Return the slot of row `row` (0 .. tile_m - 1) of this block."""
        loaded = ops.load(self._order, T.i32, row * 4)
        return ops.select(row < self.rows, loaded, self.slots)

    def token(self, slot: fx.Int32) -> fx.Int32:
        """Return the token of a slot; T for a row that does not exist."""
        return fx.Int32(arith.divui(slot.ir_value(), ops.const_i32(self._top_k)))


class ShortBlock(RowBlock):
    """A block as `stage1_small.py` lists it: its few slots are scalars, loaded together with its expert."""

    def __init__(self, routing: Routed, block: Value, slots: Value, top_k: int, here: Value = None) -> None:
        super().__init__(routing, block, slots, top_k, here)
        self._few = ops.scalar_loads(routing.order, block * 4, 4, alignment=16)
        ops.keep(self.rows, *self._few)

    def open(self) -> None:
        """Do nothing: the slots are scalars already."""

    def slot(self, row: Value) -> fx.Int32:
        slot = self.slots
        for number, few in enumerate(self._few):
            slot = ops.select(row == number, few, slot)
        return slot


class Workgroup:
    """One workgroup with `block`, its rows; `run` emits the whole kernel, and a kernel adds its steps."""

    block: RowBlock

    def __init__(self, cfg: Any, args: Any) -> None:
        self.cfg, self.args, self.tid = cfg, args, fx.thread_idx.x
        self.lane, self.wave = self.tid & 63, ops.uniform(self.tid >> 6)

    def run(self: Any) -> None:
        with ops.when(self.block.exists()):
            self.open_buffers()
            self.finish(self.main_loop())

    def over_chunks(self: Any, state: State, before: int, turn: int) -> State:
        """Multiply all chunks of K by `step`: `before` of them, then `turn` in a turn of a rolled loop, then the rest.

        step(chunk, state, refill, more) loads the chunk that follows by a ring if `refill`; more: it is not the last.
        """
        refilled = self.chunks - self.ring
        turns = (refilled - before) // turn

        def several(i: fx.Int32, state: State) -> State:
            for c in range(turn):
                state = self.step(i * turn + (before + c), state, refill=True, more=True)
            return state

        for c in range(before):
            state = self.step(fx.Int32(c), state, refill=c < refilled, more=c < self.chunks - 1)
        state = ops.loop(0, turns, state, several)
        for c in range(before + turns * turn, self.chunks):
            state = self.step(fx.Int32(c), state, refill=c < refilled, more=c < self.chunks - 1)
        return state

    def pin(self) -> None:
        """Keep earlier instructions before this point, unless the compiler may reorder."""
        if self.cfg.pinned:
            ops.pin_schedule()


class Stage1State(NamedTuple):
    """Loaded chunks, oldest first, and the sums that a step of the main loop passes to the next."""

    weights: list[list[Any]]
    rows: list[list[Any]]
    sums: list[Any]


class Stage1Workgroup(Workgroup):
    """A workgroup of stage 1; each wave computes `pairs` 16-channel tiles of gate, and as many of up."""

    ring_bytes: int  # weights in registers ahead
    waves_k: int  # waves that split K
    pairs: int
    row_tiles: int
    groups: list[tuple[range, Any]]  # row tiles that are multiplied together, with the condition that they exist
    rows: Value  # buffer of the token rows
    row_lane: list[Any]  # bytes where this lane's part of each row begins
    weight_lane: Value  # the same of a tile's weights
    first_at: Callable[[int], Value]  # bytes of a tile -> where this wave's first one begins

    def __init__(self, cfg: Any, args: Any) -> None:
        ops.keep(*vars(args).values())
        super().__init__(cfg, args)

    def open_buffers(self) -> None:
        cfg, tile = self.cfg, self.cfg.hidden // CHUNK_K * TILE_BYTES
        self.tiles, self.chunks = 2 * self.pairs, -(-cfg.hidden // (CHUNK_K * self.waves_k))
        self.ring = min(self.ring_bytes // (self.tiles * TILE_BYTES), self.chunks)
        self.block.open()
        self.weights = READERS[cfg.weights](self.args.weights, self.block.expert, 2 * cfg.inter * cfg.hidden)
        first, up = self.first_at(tile), cfg.inter // TILE_N * tile
        self.tile_at = [first + half * up + t * tile for half in (0, 1) for t in range(self.pairs)]

    def multiply(self, state: Stage1State, chunk: Value, rows: list[Any], refill: bool) -> Stage1State:
        """Multiply the oldest chunk of the ring with its rows; load the chunk that follows by a ring if `refill`."""
        (current, *weights), sums, loaded = state.weights, list(state.sums), []
        for tile in range(self.tiles):
            operands = self.weights.unpack(current[tile])
            self.pin()
            if refill:
                loaded.append(self.load_weight(chunk + self.ring, tile))
            part = slice(2 * tile * self.row_tiles, 2 * (tile + 1) * self.row_tiles)
            sums[part] = self.weights.multiply(operands, rows, sums[part], self.groups)
            if self.cfg.decode:
                self.pin()
        return Stage1State([*weights, loaded] if refill else weights, state.rows[1:], sums)

    def operands(self, parts: list[Any]) -> list[list[tuple[Any, Any]]]:
        """Return MFMA operands of rows as `load_rows` loads them: [row tile][k half] (high, low)."""
        halves = [ops.split_rows(part) for part in parts]
        return [halves[m : m + 2] for m in range(0, len(halves), 2)]

    def row_info(self, tokens: Iterable[Value]) -> list[Any]:
        """Load scale and low sum of these tokens' rows."""
        per_row = ops.buffer(self.args.row_info, self.args.tokens * 8)
        return [ops.load(per_row, T.i32x2, token * 8) for token in tokens]

    def load_weight(self, chunk: Value, tile: int) -> list[Any]:
        at = self.tile_at[tile] + chunk * (self.waves_k * TILE_BYTES)
        return self.weights.load(self.inside(chunk, self.weight_lane), at)

    def load_rows(self, chunk: Value) -> list[Any]:
        """Load 128 k of the rows, 32 bytes a lane and row tile."""
        at, parts = chunk * (self.waves_k * CHUNK_K), (self.weights.part(0), self.weights.part(1))
        lanes = [self.inside(chunk, lane) for lane in self.row_lane]
        return [ops.load(self.rows, T.i32x4, lane + part, at) for lane in lanes for part in parts]

    def inside(self, chunk: Value, lane: Value) -> Value:
        """Return a lane's offset, or NOWHERE if this wave's chunk lies past the end of K: the loads give zeros."""
        if self.cfg.hidden % (self.waves_k * CHUNK_K) == 0:
            return lane
        return ops.select(chunk * self.waves_k + self.wave < self.cfg.hidden // CHUNK_K, lane, ops.NOWHERE)

    def results(self) -> Value:
        return ops.buffer(self.args.out, self.args.tokens * (self.cfg.top_k * self.cfg.inter * 4))

    def exact(self, sums: Iterable[Any], info: Value) -> list[Any]:
        """Return the sums of gate and up without the row's offset; info: scale and low sum of the row."""
        offset = self.weights.offset(ops.element(info, 1))
        return [arith.subi(total, offset) for total in sums]

    def scaled(self, exact: list[Any], info: Value, w_scale: list[Any]) -> list[Any]:
        """Return gate and up as float32."""
        scale = ops.splat(ops.bitcast(ops.element(info, 0), T.f32), 4)
        pairs = zip(exact, w_scale, strict=True)
        return [arith.mulf(arith.mulf(arith.sitofp(T.f32x4, e), scale), w) for e, w in pairs]
