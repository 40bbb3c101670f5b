"""The first launch of a forward: sorts the slots by expert into blocks of rows, and quantizes the tokens meanwhile.

The first SORTERS workgroups sort a share of the slots each, and none waits for another. Each counts all slots in LDS,
separately those before its own share. It then knows where the slots of its share belong. Within an expert the
order of the slots is that of LDS atomics. No result depends on it, because a row's arithmetic does not depend on its
place in a block.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.typing import T

from ..configs import SORTERS, WAVES, QuantizeConfig, RouteConfig
from ..kernel_arguments import RouteArguments
from . import ops as ops
from .ops import Value
from .rows import EXCHANGE, Quantize, is_expert

THREADS = WAVES * ops.WAVE
LOADS = 4  # 16-byte loads of a thread in a step
STEP = THREADS * 4 * LOADS  # slots of a step


class Route:
    """One workgroup: the first SORTERS of them sort, the others quantize."""

    def __init__(self, cfg: RouteConfig, args: RouteArguments) -> None:
        self.cfg, self.args, self.tid = cfg, args, fx.thread_idx.x
        self.own = -(-cfg.experts // THREADS)  # experts of a thread
        # Bytes of each of two arrays: slots before the share (turned into places), and the other slots.
        self.counters = self.own * THREADS * 4

    def run(self) -> None:
        number, quantize = fx.block_idx.x, QuantizeConfig(self.cfg.hidden, bf16=True)
        self.lds = ops.lds_alloc(max(2 * self.counters + 8 * WAVES, EXCHANGE))
        with ops.when(number < SORTERS):
            self.sort(number)
        if self.cfg.hidden:
            with ops.when(number >= SORTERS):
                self.quantize(quantize, number - SORTERS)

    def quantize(self, cfg: QuantizeConfig, group: Value) -> None:
        """Write INT8 rows, their scales and low sums; group: number of the workgroup."""
        args = self.args
        row = group if cfg.waves_per_row > 1 else group * WAVES + ops.uniform(self.tid >> 6)
        with ops.when(row < args.tokens):
            lanes = Quantize(cfg, row, args.x, self.lds)
            words, scale, total = lanes.quantize(lanes.load())
            target = ops.item(args.a8, row, cfg.columns)
            for word, at in zip(words, lanes.column_offsets(1), strict=True):
                ops.store(target, word, at)
            pair = ops.pack([ops.bitcast(scale, T.i32), lanes.low_sum(total)])
            ops.store(ops.item(args.info, row, 8), pair, lanes.first * 8)  # lane 0 alone fits

    def sort(self, sorter: Value) -> None:
        """Sort a share of the slots; unused rows of the table are filled with 0."""
        self.slots = self.args.tokens * self.cfg.top_k
        self.ids = ops.buffer(self.args.ids, self.slots * 4)
        self.order = ops.buffer(self.args.order, self.slots * 4)
        steps = (self.slots + (STEP - 1)) // STEP
        share = (steps + (SORTERS - 1)) // SORTERS
        first = sorter * share
        with ops.when(first < steps):
            for at in range(0, 2 * self.counters, 4 * THREADS):
                ops.lds_store(self.lds, ops.const_i32(0), self.tid * 4 + at, alignment=4)
            ops.barrier()

            def count(step: Value, _: list[Any]) -> list[Any]:
                others = ops.select(step < first, 0, self.counters)
                for _, expert, valid in self.load(step):
                    with ops.when(valid):
                        ops.lds_add(self.lds, fx.Int32(others) + expert * 4)
                return []

            ops.loop(0, steps, [], count)
            ops.barrier()
            self.scan(sorter)
            ops.barrier()

            def place(step: Value, _: list[Any]) -> list[Any]:
                for slot, expert, valid in self.load(step):
                    with ops.when(valid):
                        ops.store(self.order, slot, fx.Int32(ops.lds_add(self.lds, expert * 4)) * 4)
                return []

            last = fx.Int32(arith.minsi(ops.raw(first + share), ops.raw(steps)))
            ops.loop(first, last, [], place)

    def load(self, step: Value) -> list[tuple[Any, Any, Any]]:
        """Return (slot, expert, true if both exist) of this thread."""
        first = [step * STEP + self.tid * 4 + i * (4 * THREADS) for i in range(LOADS)]
        words = [ops.load(self.ids, T.i32x4, slot * 4) for slot in first]
        found = []
        for slot, four in zip(first, words, strict=True):
            for i, expert in enumerate(ops.elements(four)):
                here = is_expert(fx.Int32(expert), self.cfg.experts)
                found.append((slot + i, fx.Int32(expert), ops.both(here, slot + i < self.slots)))
        return found

    def scan(self, sorter: Value) -> None:
        """Turn counts into places; the first workgroup also writes the blocks."""
        before, rows, tiles = [], [], []
        shift = self.cfg.tile_m.bit_length() - 1
        for i in range(self.own):
            at = (self.tid * self.own + i) * 4
            parts = [fx.Int32(ops.lds_load(self.lds, T.i32, at + h * self.counters, alignment=4)) for h in (0, 1)]
            before.append(parts[0])
            rows.append(parts[0] + parts[1])
            tiles.append((rows[-1] + (self.cfg.tile_m - 1)) >> shift)
        (first, _), (tile, all_tiles) = self.exclusive(rows, tiles)
        table = ops.buffer(self.args.table, self.args.blocks * 16)
        for i in range(self.own):
            expert = self.tid * self.own + i
            ops.lds_store(self.lds, first + before[i], expert * 4, alignment=4)
            start, here, at = first, rows[i], tile

            def write(
                number: Value, _: list[Any], start: Value = start, here: Value = here, at: Value = at, e: Value = expert
            ) -> list[Any]:
                done = number * self.cfg.tile_m
                some = arith.minsi(ops.raw(here - done), ops.const_i32(self.cfg.tile_m))
                ops.store(table, ops.pack([e, start + done, some, all_tiles]), (at + number) * 16)
                return []

            ops.loop(0, ops.select(sorter == 0, tiles[i], 0), [], write)
            first, tile = first + rows[i], tile + tiles[i]

        def clear(step: Value, _: list[Any]) -> list[Any]:
            none = ops.const_i32(0)
            ops.store(table, ops.pack([none, none, none, all_tiles]), (all_tiles + step * THREADS + self.tid) * 16)
            return []

        unused = (self.args.blocks - all_tiles + (THREADS - 1)) // THREADS
        ops.loop(0, ops.select(sorter == 0, unused, 0), [], clear)

    def exclusive(self, *lists: list[Any]) -> list[tuple[Any, Any]]:
        """Return, for each list of a thread's numbers, (sum over all threads before this one, sum over all threads)."""
        lane, wave = self.tid & 63, ops.uniform(self.tid >> 6)
        own = [sum(numbers[1:], numbers[0]) for numbers in lists]
        total = own
        for distance in (1, 2, 4, 8, 16, 32):
            others = [ops.from_lane(ops.raw(t), lane - distance) for t in total]
            there = lane >= distance
            total = [t + fx.Int32(ops.select(there, o, 0)) for t, o in zip(total, others, strict=True)]
        at = 2 * self.counters
        with ops.when(lane == 63):
            ops.lds_store(self.lds, ops.pack(total), wave * 8 + at, alignment=8)
        ops.barrier()
        parts = [ops.elements(ops.lds_load(self.lds, T.i32x2, fx.Int32(at + 8 * w), alignment=8)) for w in range(WAVES)]
        result = []
        for n, (t, o) in enumerate(zip(total, own, strict=True)):
            before, everything = t - o, fx.Int32(0)
            for w, part in enumerate(parts):
                everything = everything + fx.Int32(part[n])
                before = before + fx.Int32(ops.select(wave > w, part[n], 0))
            result.append((before, everything))
        return result
