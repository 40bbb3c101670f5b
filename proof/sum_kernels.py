"""The kernels of `sums.py`: the backend's own up to their sums; they need FlyDSL."""

from __future__ import annotations

from typing import Any

from kimi_w4a8_eagle3.moe.flydsl.configs import WAVES, Stage1Config, Stage2Config
from kimi_w4a8_eagle3.moe.flydsl.kernels import ops
from kimi_w4a8_eagle3.moe.flydsl.kernels.launcher import stage1_kind, stage2_kind
from kimi_w4a8_eagle3.moe.flydsl.kernels.stage1_prefill import ROW_TILES
from kimi_w4a8_eagle3.moe.flydsl.layout import PAIR, TILE_N


class _Stage1:
    """Stores exact sums of gate and up where the kernel has h."""

    def store_sums(self: Any, exact: Any, slot: Any, lane_at: Any, at: Any) -> None:
        inter_bytes = self.cfg.inter * 4
        out = ops.buffer(self.args.out, self.args.tokens * (self.cfg.top_k * 2 * inter_bytes))
        for half in (0, 1):
            ops.store(out, exact[half], slot * (2 * inter_bytes) + lane_at, at + half * inter_bytes)


class _DecodeSums(_Stage1):
    def finish(self: Any, sums: list[Any]) -> None:
        channel = (self.column * self.pairs + self.wave % self.pairs) * TILE_N + (self.lane >> 4) * 4
        lds, info = self.exchange(WAVES * self.pairs * self.row_tiles * 1024)
        gate, up = (self.sum_over_waves(lds, sums, half) for half in (0, 1))
        with ops.when(self.wave < self.pairs):
            for m, slot in enumerate(self.slot):
                self.store_sums(self.exact([gate[m], up[m]], info[m]), slot, channel * 4, 0)


class _PrefillSums(_Stage1):
    def finish(self: Any, sums: list[Any]) -> None:
        slots = self.slots_of(self.wave % self.waves_m * (TILE_N * ROW_TILES), ROW_TILES)
        info = self.row_info(map(self.block.token, slots))
        for t in range(self.pairs):
            for m, slot in enumerate(slots):
                tiles = [2 * ((half * self.pairs + t) * ROW_TILES + m) for half in (0, 1)]
                exact = self.exact([self.weights.total(sums[i], sums[i + 1]) for i in tiles], info[m])
                self.store_sums(exact, slot, (self.lane >> 4) * 16, (self.first_tile + t) * (TILE_N * 4))


class _Stage2:
    def write(self: Any, base: Any, tile: int, sums: Any, scale: Any) -> None:
        half = tile % PAIR
        at = (self.out_channel + (base + (tile - half)) * TILE_N) * 4
        out = ops.buffer(self.args.out, self.args.tokens * self.cfg.top_k * (self.columns * 4))
        exact_sums = self.weights.scaled(*sums, ops.splat(ops.const_f32(1.0), 4), self.cfg.inter)
        for slot, exact in zip(self.slot, exact_sums, strict=True):
            lane_at = slot * (self.columns * 4) + (self.lane >> 4) * (PAIR * 16) + half * 16
            ops.store(out, exact, lane_at, at)


def stage1_sums(cfg: Stage1Config) -> type:
    return type("Stage1Sums", (_DecodeSums if cfg.decode else _PrefillSums, stage1_kind(cfg)), {})


def stage2_sums(cfg: Stage2Config) -> type:
    return type("Stage2Sums", (_Stage2, stage2_kind(cfg)), {})
