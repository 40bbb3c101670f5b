"""Stage 1 for few tokens: decode's kernel, which also sorts and quantizes, so that it is the first launch.

A workgroup belongs to a slot, and its waves compare the experts of all slots with that slot's. If the number of earlier
slots of the expert is a multiple of four, the workgroup's rows are that slot and the next three of the expert;
otherwise another workgroup has its row. The workgroup quantizes the bfloat16 tokens of its rows into LDS while the
first weights are loading. The tokens are loaded before the weights, because loads return in order. Beside `h` the
kernel writes the tables that stage 2 reads: block `slot` has places `OWN_ROWS * slot` and on of `order`.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith, rocdl
from flydsl.expr.typing import T

from ..configs import OWN_ROWS, OWN_SLOTS, WAVES, QuantizeConfig, Stage1Config
from ..kernel_arguments import Stage1Arguments
from ..layout import CHUNK_K
from . import ops as ops
from .block import RowBlock
from .ops import Value
from .rows import EXCHANGE, Quantize, is_expert
from .stage1_decode import Stage1Decode


class OwnBlock(RowBlock):
    """The block of slot `first`, found from the slots' expert ids in args.row_info; `list` is LDS for its slots."""

    list: Any

    def __init__(self, cfg: Stage1Config, args: Stage1Arguments, first: Value) -> None:
        self.first, self.slots, self._top_k, self._here = first, args.tokens * cfg.top_k, cfg.top_k, None
        self.expert = ops.scalar_load(args.row_info, first)
        self.lane = fx.thread_idx.x & 63
        self.wave = ops.uniform(fx.thread_idx.x >> 6)
        ids = ops.buffer(args.row_info, self.slots * 4)
        self.places = [self.lane + 64 * j for j in range(OWN_SLOTS // 64)]
        found = [fx.Int32(ops.load(ids, T.i32, place * 4)) for place in self.places]
        pairs = zip(found, self.places, strict=True)
        self.same = [ops.both(e == self.expert, p < self.slots) for e, p in pairs]
        earlier = [ops.both(s, p < first) for s, p in zip(self.same, self.places, strict=True)]
        self.masks = [ops.ballot(s) for s in self.same]
        self.before = sum((ops.count_bits(ops.ballot(e)) for e in earlier), fx.Int32(0))
        left = sum((ops.count_bits(m) for m in self.masks), fx.Int32(0)) - self.before
        rows = arith.minsi(ops.raw(left), ops.const_i32(OWN_ROWS))
        leads = ops.both(is_expert(self.expert, cfg.experts), (self.before & (OWN_ROWS - 1)) == 0)
        self.rows = fx.Int32(ops.select(leads, rows, 0))

    def open(self) -> None:
        """List the rows in LDS, in `list`, 16 bytes for each wave."""
        self.at = self.wave * (4 * OWN_ROWS)
        before = fx.Int32(0) - self.before
        for same, place, mask in zip(self.same, self.places, self.masks, strict=True):
            low, high = ops.elements(ops.bitcast(mask, T.i32x2))
            below = rocdl.mbcnt_hi(T.i32, high, rocdl.mbcnt_lo(T.i32, low, ops.raw(before)))
            number = fx.Int32(below)  # of the slots of this expert before this lane's
            with ops.when(arith.andi(same, is_expert(number, OWN_ROWS))):
                ops.lds_store(self.list, place, self.at + number * 4, alignment=4)
            before = before + ops.count_bits(mask)

    def row(self, number: Value) -> Value:
        """Return the place of row `number` among those that exist; the first place for a row that does not."""
        return ops.select(number < self.rows, number, 0)

    def slot(self, row: Value) -> fx.Int32:
        slot = ops.lds_load(self.list, T.i32, self.at + self.row(row) * 4, alignment=4)
        return ops.select(row < self.rows, slot, self.slots)

    def write_block(self, blocks: Value) -> None:
        """Write this block's line in stage 2's table."""
        line = ops.pack([self.expert, self.first * OWN_ROWS, self.rows, fx.Int32(0)])
        here = ops.select(self.lane == 0, self.first * 16, ops.NOWHERE)
        ops.store(ops.buffer(blocks, self.slots * 16), line, here)

    def write_order(self, order: Value, slot: Value) -> None:
        """Write OWN_ROWS slots, one from each lane, including those of rows that do not exist."""
        here = ops.select(self.lane < OWN_ROWS, (self.first * OWN_ROWS + self.lane) * 4, ops.NOWHERE)
        ops.store(ops.buffer(order, self.slots * (4 * OWN_ROWS)), slot, here)


class Stage1Small(Stage1Decode):
    """One workgroup: the rows of `OwnBlock` x `tile_n` channels of gate and up."""

    block: OwnBlock

    def find_block(self) -> OwnBlock:
        """Return the rows of this workgroup; the first workgroup of each slot writes them to stage 2's tables."""
        block = OwnBlock(self.cfg, self.args, fx.block_idx.y)
        with ops.when((self.column * WAVES + self.wave) == 0):
            block.write_block(self.args.blocks)
            with ops.when(block.rows == 0):
                block.write_order(self.args.order, block.slots)
        return block

    def open_buffers(self) -> None:
        """Open decode's buffers, and start to load the tokens, each by the whole workgroup.

        LDS: rows (later the waves' sums), exchange of maxima, scales and low sums, lists.
        """
        self.row_bytes = -(-self.cfg.hidden // 1024) * 1024 + 16  # rows begin in different banks
        self.rows_end = max(OWN_ROWS * self.row_bytes, WAVES * self.pairs * 1024)
        self.lds = ops.lds_alloc(self.rows_end + EXCHANGE + 8 * OWN_ROWS + 4 * OWN_ROWS * WAVES)
        self.info_at = self.rows_end + EXCHANGE
        self.block.list = ops.lds_at(self.lds, fx.Int32(self.info_at + 8 * OWN_ROWS))
        super().open_buffers()
        with ops.when((self.column * WAVES + self.wave) == 0):
            self.block.write_order(self.args.order, self.slot[0])
        exchange = ops.lds_at(self.lds, fx.Int32(self.rows_end))
        cfg = QuantizeConfig(self.cfg.hidden, bf16=True, together=True)
        self.quantizers = []
        for row in range(OWN_ROWS):
            token = ops.uniform(self.block.token(self.block.slot(fx.Int32(row))))
            self.quantizers.append(Quantize(cfg, token, self.args.rows, exchange))
        self.loaded = [q.load(fx.Int32(row) < self.block.rows) for row, q in enumerate(self.quantizers)]
        ops.pin_schedule()

    def start_rows(self) -> None:
        """Quantize the tokens into LDS."""
        for row, (lanes, loaded) in enumerate(zip(self.quantizers, self.loaded, strict=True)):
            with ops.when(fx.Int32(row) < self.block.rows):
                words, scale, total = lanes.quantize(loaded)
                for i, word in enumerate(words):
                    at = lanes.first + (row * self.row_bytes + i * lanes.step)
                    ops.lds_store(self.lds, word, at, alignment=4)
                info = ops.pack([ops.bitcast(scale, T.i32), lanes.low_sum(total)])
                with ops.when(fx.thread_idx.x == 0):
                    ops.lds_store(self.lds, info, fx.Int32(self.info_at + 8 * row), alignment=8)
        self.lane_row = self.block.row(self.lane & 15)
        self.row_at = self.lane_row * self.row_bytes + self.weights.corner(self.lane) + self.wave * CHUNK_K

    def load_rows(self, chunk: Value) -> list[Any]:
        """Load this wave's 128 k of the rows from LDS."""
        at = self.row_at + chunk * (WAVES * CHUNK_K)
        return [ops.lds_load(self.lds, T.i32x4, at + self.weights.part(j)) for j in (0, 1)]

    def exchange(self, size: int) -> tuple[Any, list[Any]]:
        """Return the LDS of the rows for the sums, and [scale, low sum] of this lane's row."""
        ops.barrier()
        return self.lds, [ops.lds_load(self.lds, T.i32x2, self.lane_row * 8 + self.info_at, alignment=8)]
