"""Stage 2 and the reduction in one launch, for few tokens: no row is sorted, no slot is written.

A workgroup takes `tile_n` channels of one token, each wave a few of its slots. A wave starts to load all weights that
it needs, quantizes its slots' rows into its own part of LDS meanwhile, and multiplies with a row in all sixteen places
of the matrix instruction. The slots' float16 results meet in LDS, where they are added in the order and the arithmetic
of `rows.Reduce`. A token's result is therefore bit for bit that of the kernels for more tokens.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.typing import T

from ..configs import WAVES, ByTokenConfig, QuantizeConfig
from ..kernel_arguments import ByTokenArguments
from ..layout import CHUNK_K, PAIR, SCALES_PAD, TILE_BYTES, TILE_N
from . import ops as ops
from .block import Workgroup
from .ops import Value
from .rows import Quantize, is_expert
from .weights import READERS


class _Slot:
    """One slot of a wave: loads its expert's weights and its row, and computes `tile_n` float16 results."""

    def __init__(self, work: Stage2Token, number: Value, expert: Value, late: bool) -> None:
        """late: load scales and factors only when they are needed, which saves registers."""
        cfg, self.work, self.late = work.cfg, work, late
        self.number, self.slot = number, work.token * cfg.top_k + number
        self.routed = routed = is_expert(expert, cfg.experts)
        self.expert = ops.select(routed, expert, 0)
        # The buffers are empty for a slot without an expert here.
        self.weights = READERS[cfg.weights](work.args.weights, self.expert, cfg.hidden * cfg.inter, routed)
        self.scales = ops.item(work.args.scales, self.expert, (cfg.hidden + SCALES_PAD) * 4, routed)

    def load(self) -> None:
        """Start all loads, the row's first."""
        cfg, work = self.work.cfg, self.work
        self.lanes = Quantize(QuantizeConfig(cfg.inter, bf16=False), self.slot, work.args.rows, None)
        self.row = self.lanes.load(self.routed)
        if not self.late:
            self.load_factors()
        ops.pin_schedule()
        chunks = cfg.inter // CHUNK_K
        at = [(work.channel // TILE_N + t) * (chunks * TILE_BYTES) for t in range(cfg.tile_n // TILE_N)]
        load = self.weights.load
        self.words = [[load(work.lane * 16 + c * TILE_BYTES, tile) for c in range(chunks)] for tile in at]
        if not self.late:
            self.load_scales()
        ops.pin_schedule()

    def load_factors(self) -> None:
        unit = ops.load(self.scales, T.f32, fx.Int32(self.work.cfg.hidden * 4))
        router = ops.item(self.work.args.router, self.slot, 4)
        self.factors = ops.load(router, T.f32, fx.Int32(0)), unit

    def load_scales(self) -> None:
        lane, first = (self.work.lane >> 4) * (PAIR * 16), self.work.channel
        self.scale = [
            ops.load(self.scales, T.f32x4, lane + tile % PAIR * 16, (first + tile // PAIR * (PAIR * TILE_N)) * 4)
            for tile in range(self.work.cfg.tile_n // TILE_N)
        ]

    def multiply(self) -> None:
        cfg, work = self.work.cfg, self.work
        if self.late:
            self.load_factors()
            self.load_scales()
        words, scale, total = self.lanes.quantize(self.row)
        starts = self.weights.start(self.lanes.low_sum(total), cfg.inter)
        for word, at in zip(words, range(0, cfg.inter, self.lanes.step), strict=True):
            ops.lds_store(work.lds, word, work.own + self.lanes.first + at, alignment=4)
        for factor in self.factors:
            scale = arith.mulf(scale, factor)
        self.factor = arith.select(self.routed, scale, ops.const_f32(0.0))
        corner = work.own + self.weights.corner(work.lane)
        parts = map(self.weights.part, range(cfg.inter // 64))
        rows = [ops.split_rows(ops.lds_load(work.lds, T.i32x4, corner + part)) for part in parts]
        self.halves: list[Any] = []
        for packed, scales in zip(self.words, self.scale, strict=True):
            sums = [ops.splat(start, 4) for start in starts]
            tiles = [self.weights.unpack(words) for words in packed]
            for tile, at in zip(tiles, range(0, len(rows), 2), strict=True):
                sums = self.weights.multiply(tile, [rows[at : at + 2]], sums)
            [value] = self.weights.scaled(sums, tiles, scales, cfg.inter)
            self.halves += ops.elements(ops.to_f16(value))

    def write(self) -> None:
        """Write results and the factor of the sum to LDS, from each sixteenth lane: channels 8 * g and on."""
        work = self.work
        with ops.when((work.lane & 15) == 0):
            at = self.number * (work.cfg.tile_n * 2) + work.lane + work.results_at
            for pair in range(len(self.halves) // 4):
                ops.lds_store(work.lds, ops.pack(self.halves[4 * pair : 4 * pair + 4]), at + pair * (PAIR * TILE_N * 2))
            ops.lds_store(work.lds, self.factor, self.number * 4 + work.factors_at, alignment=4)


class Stage2Token(Workgroup):
    """One workgroup: `tile_n` channels of a token."""

    def __init__(self, cfg: ByTokenConfig, args: ByTokenArguments) -> None:
        ops.keep(*vars(args).values())
        super().__init__(cfg, args)
        self.token, self.channel = fx.block_idx.y, fx.block_idx.x * cfg.tile_n
        room = -(-cfg.inter // 256) * 256  # of a wave's row
        self.own, self.results_at = self.wave * room, WAVES * room
        self.factors_at = self.results_at + cfg.top_k * cfg.tile_n * 2
        self.lds = ops.lds_alloc(self.factors_at + 4 * cfg.top_k)

    def run(self) -> None:
        cfg = self.cfg
        first = self.wave * cfg.slots
        experts = ops.scalar_loads(self.args.ids, self.token * cfg.top_k + first, cfg.slots)
        slots = [_Slot(self, first + i, expert, bool(cfg.weights.block and i)) for i, expert in enumerate(experts)]
        for step in (_Slot.load, _Slot.multiply, _Slot.write):
            for slot in slots:
                step(slot)
        ops.barrier()
        with ops.when(self.tid < cfg.tile_n // 2):
            total = [ops.const_f32(0.0)] * 2
            for s in range(cfg.top_k):
                at = self.tid * 4 + (self.results_at + s * cfg.tile_n * 2)
                word = ops.lds_load(self.lds, T.i32, at, alignment=4)
                scale = ops.lds_load(self.lds, T.f32, fx.Int32(self.factors_at + 4 * s), alignment=4)
                total = [ops.fma_f16(word, bool(high), scale, t) for high, t in enumerate(total)]
            row = ops.item(self.args.out, self.token, cfg.hidden * 2)
            ops.store(row, ops.element(ops.to_bf16(ops.pack(total)), 0), self.tid * 4 + self.channel * 2)
