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

from . import ops as ops
from .configs import SORTERS, WAVES, QuantizeConfig, RouteConfig
from .kernel_arguments import RouteArguments
from .launcher import launcher
from .ops import Value
from .rows import EXCHANGE, Quantize, is_expert

THREADS = WAVES * ops.WAVE
LOADS = 4  # 16-byte loads of a thread in a step
STEP = THREADS * 4 * LOADS  # slots of a step


class _Sort:
    """One workgroup of the SORTERS."""

    def __init__(self, cfg: RouteConfig, lds: Value, args: RouteArguments) -> None:
        self.cfg, self.lds, self.slots, self.tid = cfg, lds, args.tokens * cfg.top_k, fx.thread_idx.x
        self.ids = ops.buffer(args.ids, self.slots * 4)
        self.order = ops.buffer(args.order, self.slots * 4)
        self.blocks = args.table
        self.own = _own(cfg)
        # Bytes of each of two arrays: slots before the share (turned into places), and the other slots.
        self.counters = self.own * THREADS * 4
        self.i32 = ops.i32_type()

    def run(self, sorter: Value, blocks: Value) -> None:
        """Emit the sort. blocks: rows of the table; unused rows are filled with 0."""
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
            self.scan(sorter, blocks)
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
        words = [ops.load(self.ids, ops.vec_type(4, self.i32), slot * 4) for slot in first]
        found = []
        for slot, four in zip(first, words, strict=True):
            for i, expert in enumerate(ops.elements(four)):
                here = is_expert(fx.Int32(expert), self.cfg.experts)
                found.append((slot + i, fx.Int32(expert), ops.both(here, slot + i < self.slots)))
        return found

    def scan(self, sorter: Value, blocks: Value) -> None:
        """Turn counts into places; the first workgroup also writes the blocks."""
        before, rows, tiles = [], [], []
        shift = self.cfg.tile_m.bit_length() - 1
        for i in range(self.own):
            at = (self.tid * self.own + i) * 4
            parts = [fx.Int32(ops.lds_load(self.lds, self.i32, at + h * self.counters, alignment=4)) for h in (0, 1)]
            before.append(parts[0])
            rows.append(parts[0] + parts[1])
            tiles.append((rows[-1] + (self.cfg.tile_m - 1)) >> shift)
        (first, _), (tile, all_tiles) = self.exclusive(rows, tiles)
        table = ops.buffer(self.blocks, blocks * 16)
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

        unused = (blocks - all_tiles + (THREADS - 1)) // THREADS
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
        pair = ops.vec_type(2, self.i32)
        parts = [ops.elements(ops.lds_load(self.lds, pair, fx.Int32(at + 8 * w), alignment=8)) for w in range(WAVES)]
        result = []
        for n, (t, o) in enumerate(zip(total, own, strict=True)):
            before, everything = t - o, fx.Int32(0)
            for w, part in enumerate(parts):
                everything = everything + fx.Int32(part[n])
                before = before + fx.Int32(ops.select(wave > w, part[n], 0))
            result.append((before, everything))
        return result


def _own(cfg: RouteConfig) -> int:
    """Return the number of experts of a thread."""
    return -(-cfg.experts // THREADS)


def _lds_bytes(cfg: RouteConfig) -> int:
    return max(2 * _own(cfg) * THREADS * 4 + 8 * WAVES, EXCHANGE)


def _quantize_row(columns: int, group: Value, args: RouteArguments, lds: Value) -> None:
    """Write the INT8 row, its scale and its low sum; group: number of the workgroup."""
    cfg = QuantizeConfig(columns, bf16=True)
    row = group if cfg.waves_per_row > 1 else group * WAVES + ops.uniform(fx.thread_idx.x >> 6)
    with ops.when(row < args.tokens):
        lanes = Quantize(cfg, row, args.x, lds)
        words, scale, total = lanes.quantize(lanes.load())
        target = ops.item(args.a8, row, columns)
        for word, at in zip(words, lanes.column_offsets(1), strict=True):
            ops.store(target, word, at)
        pair = ops.pack([ops.bitcast(scale, ops.i32_type()), lanes.low_sum(total)])
        ops.store(ops.item(args.info, row, 8), pair, lanes.first * 8)  # lane 0 alone fits


def build(cfg: RouteConfig) -> Any:
    """Build the kernel of one configuration, for `toolchain.compiled`."""

    def emit(args: RouteArguments) -> None:
        number, lds = fx.block_idx.x, ops.lds_alloc(_lds_bytes(cfg))
        with ops.when(number < SORTERS):
            _Sort(cfg, lds, args).run(number, args.blocks)
        if cfg.hidden:
            with ops.when(number >= SORTERS):
                _quantize_row(cfg.hidden, number - SORTERS, args, lds)

    return launcher("moe_route", RouteArguments, emit)
