"""Stage 2 of the rows that stage 1 wrote in float32: a workgroup quantizes those of its block.

Sixteen lanes quantize a row while the first weights are loading, and LDS passes the rows to the waves. In a prefill
only the launch for the first columns quantizes. It also writes the quantized rows, which the other launches load.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.typing import T

from ..configs import OWN_ROWS
from ..layout import LOW_K_BIT
from . import ops as ops
from .block import ShortBlock
from .rows import over_lanes, quantized, row_scale
from .stage2 import Stage2


class Stage2Decode(Stage2):
    """Every workgroup quantizes."""

    share, places = 16, 16  # lanes of a row, rows of a row tile

    def start_rows(self) -> tuple[Any, ...]:
        self.own = self.wave * 4 + (self.lane >> 4)  # first row that this lane quantizes
        return () if self.cfg.keeps else (self.quantized_slots(0),)

    def quantized_slots(self, start: int) -> list[Any]:
        """Return the slots of the rows that this lane helps to quantize: row tiles from `start` on, for each wave."""
        cfg = self.cfg
        tiles = [w * self.row_tiles + start + i for w in range(cfg.waves_m) for i in range(cfg.quantized_tiles)]
        return [self.block.slot(self.own + 16 * tile) for tile in tiles]

    def int8_rows(self, slots: Any = (), loaded: Any = ()) -> list[Any]:
        """Quantize rows through LDS, as many row tiles at a time as fit."""
        cfg, at_once = self.cfg, self.cfg.quantized_tiles
        self.lds = ops.lds_alloc(cfg.lds_bytes)
        place, found = self.lane & (self.places - 1), []
        for start in range(0, self.row_tiles, at_once):
            here = slots or self.quantized_slots(start)
            if start:
                ops.barrier()  # the tiles before have been read
            self.quantize_rows(here, loaded or self.load_own(here))
            for i in range(at_once):
                at = (self.wave % cfg.waves_m * (16 * at_once) + 16 * i + place) * cfg.row_bytes
                ends = [at + self.weights.corner(self.lane) + self.weights.part(j) for j in range(cfg.inter // 64)]
                found += [ops.lds_load(self.lds, T.i32x4, end) for end in ends]
                found.append(ops.lds_load(self.lds, T.i32, at + cfg.inter, alignment=4))
        return found

    def load_own(self, slots: list[Any]) -> list[tuple[list[Any], Any, Any]]:
        """Start to load the input of quantizing these slots: values, router weight, the expert's unit."""
        cfg, part = self.cfg, self.lane & (self.share - 1)
        router = ops.buffer(self.args.router, self.args.tokens * (cfg.top_k * 4))
        unit = ops.load(self.scales, T.f32, fx.Int32(cfg.hidden * 4))
        found = []
        for slot in slots:
            at = [slot * (cfg.inter * 4) + part * 16 + j for j in range(0, cfg.inter * 4, self.share * 16)]
            values = [ops.load(self.rows, T.f32x4, offset) for offset in at]
            found.append((values, ops.load(router, T.f32, slot * 4), unit))
        return found

    def quantize_rows(self, slots: list[Any], loaded: list[tuple[list[Any], Any, Any]]) -> None:
        """Bring rows to LDS as INT8, each followed by its low sum; to places own, own + 16 and so on."""
        cfg, part = self.cfg, self.lane & (self.share - 1)

        over_row = partial(over_lanes, lane=self.lane, count=self.share)
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
            ops.store(self.info, ops.pack([ops.bitcast(stored, T.i32), low]), place)
        ops.barrier()


class Stage2Small(Stage2Decode):
    """A block has up to OWN_ROWS rows: a whole wave quantizes each."""

    blocks, share, places = ShortBlock, ops.WAVE, OWN_ROWS

    def start_rows(self) -> tuple[Any, ...]:
        self.own = self.wave
        slots = self.quantized_slots(0)
        return slots, self.load_own(slots)


class Stage2Prefill(Stage2Decode):
    """The launch for column 0 quantizes, and keeps the rows for the launches of other columns."""

    def int8_rows(self, slots: Any = (), loaded: Any = ()) -> list[Any]:
        kinds = ([T.i32x4] * (self.cfg.inter // 64) + [T.i32]) * self.row_tiles
        return ops.choose(self.later_columns, kinds, self.rows_in_memory, super().int8_rows)

    def rows_in_memory(self) -> list[Any]:
        """Load what `int8_rows` returns."""
        found = []
        for slot in self.slot:
            at = slot * self.cfg.inter + self.weights.corner(self.lane)
            parts = map(self.weights.part, range(self.cfg.inter // 64))
            found += [ops.load(self.kept_rows, T.i32x4, at + part) for part in parts]
            found.append(ops.element(ops.load(self.info, T.i32x2, slot * 8), 1))
        return found
