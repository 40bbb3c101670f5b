"""The W4A16 baseline for A/B runs: bfloat16 rows and BF16 MFMA on the same packed INT4 weights.

One kernel serves both stages: a wave computes 16 gate and 16 up channels (stage 1) or 32 channels (stage 2) of the
workgroup's rows over all of K. Weights and rows go straight from memory to operands.

A nibble becomes bfloat16 without conversion: `0x4300 | (weight + 8)` is the bfloat16 136 + weight. The surplus is
subtracted at the end as 136 times the sum of the row, which one more MFMA per step computes with an operand of ones.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx
from flydsl.expr import arith
from flydsl.expr.rocdl import perm_b32
from flydsl.expr.typing import T

from ..configs import W4A16_TILES, WAVES, W4A16Config
from ..kernel_arguments import W4A16Arguments
from ..layout import CHUNK_K, PAIR, SCALES_PAD, TILE_BYTES, TILE_N
from . import ops as ops
from .block import RowBlock, Workgroup
from .ops import Value

RING = 4  # chunks of weights in registers: 8 KiB a wave
SURPLUS = 136.0
ROW_LOADS = 4  # 16-byte loads of 128 k of a row, spread over four lanes


def _weights_bf16(words: Value) -> list[Any]:
    """Unpack 16 bytes to eight operands of four bfloat16, each weight + 136."""
    mask, exponent = ops.const_i32(0x000F000F), ops.const_i32(0x43004300)
    operands = []
    for word in ops.elements(words):
        binary = arith.xori(word, ops.const_i32(0x80808080))  # turns high nibbles into offset binary too
        low0, high0, low1, high1 = (
            arith.ori(arith.andi(arith.shrui(binary, ops.const_i32(s)), mask), exponent) for s in (0, 4, 8, 12)
        )
        operands += [ops.bf16x4(high0, high1), ops.bf16x4(low0, low1)]
    return operands


def _rows_bf16(parts: list[Any]) -> list[Any]:
    """Reorder four loads (k 0-7, 8-15, 64-71, 72-79 of the lane's group) to the operand order of `_weights_bf16`."""
    operands = []
    for first, second in (parts[0:2], parts[2:4]):
        high, low = ops.elements(first), ops.elements(second)
        for at in (0, 2):
            for words in (high, low):  # (k, k+1), (k+2, k+3) -> (k, k+2), (k+1, k+3)
                even = perm_b32(words[at + 1], words[at], ops.const_i32(0x05040100))
                odd = perm_b32(words[at + 1], words[at], ops.const_i32(0x07060302))
                operands.append(ops.bf16x4(even, odd))
    return operands


class W4A16(Workgroup):
    """One workgroup: `tile_m` routed rows x `tile_n` channels."""

    def __init__(self, cfg: W4A16Config, args: W4A16Arguments) -> None:
        super().__init__(cfg, args)
        self.column = fx.block_idx.x
        self.block = RowBlock(args, fx.block_idx.y, args.tokens * cfg.top_k, cfg.top_k)
        self.row_tiles, self.chunks = cfg.tile_m // 16, cfg.k // CHUNK_K
        self.ring = min(RING, self.chunks)

    def open_buffers(self) -> None:
        """Open the block's tables and buffers, and choose the tiles that this wave computes."""
        cfg, args = self.cfg, self.args
        self.block.open()
        self.channels = 2 * cfg.inter if cfg.stage == 1 else cfg.hidden
        expert_bytes = self.channels * cfg.k // 2
        self.weights = ops.item(args.weights, self.block.expert, expert_bytes)
        if cfg.stage == 1:
            gate = self.column * WAVES + self.wave
            self.tile = [gate, gate + cfg.inter // 16]
        else:
            first = (self.column * WAVES + self.wave) * W4A16_TILES
            self.tile = [first, first + 1]
        self.slot = [self.block.slot((self.lane & 15) + 16 * m) for m in range(self.row_tiles)]
        count = args.tokens if cfg.stage == 1 else args.tokens * cfg.top_k
        self.rows = ops.buffer(args.rows, count * (cfg.k * 2))
        row = [self.block.token(s) if cfg.stage == 1 else s for s in self.slot]
        self.row_at = [r * (cfg.k * 2) + (self.lane >> 4) * 32 for r in row]

    def load_weights(self, chunk: Value) -> list[Any]:
        """Load one chunk of 128 k of this wave's tiles."""
        tile_bytes = self.cfg.k // CHUNK_K * TILE_BYTES
        return [ops.load(self.weights, T.i32x4, self.lane * 16, t * tile_bytes + chunk * TILE_BYTES) for t in self.tile]

    def load_rows(self, chunk: Value) -> list[Any]:
        at = chunk * (CHUNK_K * 2)
        return [ops.load(self.rows, T.i32x4, r + o, at) for r in self.row_at for o in (0, 16, 128, 144)]

    def main_loop(self) -> list[Any]:
        """Return the sums of [tile][row tile], then the row sums of [row tile]."""
        weights = [x for c in range(self.ring) for x in self.load_weights(fx.Int32(c))]
        rows = self.load_rows(fx.Int32(0))
        sums = [ops.splat(ops.const_f32(0.0), 4)] * ((W4A16_TILES + 1) * self.row_tiles)
        return self.over_chunks([weights, rows, sums], before=0, turn=1)[2]

    def step(self, chunk: Value, state: list[list[Any]], refill: bool, more: bool) -> list[list[Any]]:
        """Multiply the oldest chunk of the ring."""
        weights, rows, acc = state
        next_rows = self.load_rows(chunk + 1) if more else rows
        ops.pin_schedule()
        operands = [_weights_bf16(w) for w in weights[:W4A16_TILES]]
        ahead = self.load_weights(chunk + self.ring) if refill else []
        return [[*weights[W4A16_TILES:], *ahead], next_rows, self.multiply(operands, rows, acc)]

    def multiply(self, operands: list[list[Any]], rows: list[Any], acc: list[Any]) -> list[Any]:
        """Multiply one chunk; `acc` is laid out as main_loop returns it."""
        acc = list(acc)
        ones = ops.bf16x4(*[ops.const_i32(0x3F803F80)] * 2)
        for m in range(self.row_tiles):
            row_operands = _rows_bf16(rows[ROW_LOADS * m : ROW_LOADS * (m + 1)])
            for t, weights in enumerate([*operands, [ones] * len(row_operands)]):
                at = t * self.row_tiles + m
                for w, r in zip(weights, row_operands, strict=True):
                    acc[at] = ops.mfma_bf16(w, r, acc[at])
        return acc

    def finish(self, acc: list[Any]) -> None:
        """Subtract the surplus, scale, apply SiLU in stage 1, and store four channels of one row a lane."""
        cfg, args = self.cfg, self.args
        scale_bytes = (self.channels + (SCALES_PAD if cfg.stage == 2 else 0)) * 4
        scales = ops.item(args.w_scale, self.block.expert, scale_bytes)
        group = self.lane >> 4
        if cfg.stage == 1:
            scale = [ops.load(scales, T.f32x4, group * 16, t * (TILE_N * 4)) for t in self.tile]
        else:  # the scales of a lane's eight channels are relative to their expert's unit
            parts = [ops.load(scales, T.f32x4, group * (PAIR * 16) + h * 16, self.tile[0] * 64) for h in range(PAIR)]
            unit = ops.splat(ops.load(scales, T.f32, fx.Int32(self.channels * 4)), 4)
            scale = [arith.mulf(part, unit) for part in parts]
        out = ops.buffer(args.out, args.tokens * (cfg.top_k * cfg.columns * 2))
        for m, slot in enumerate(self.slot):
            surplus = arith.mulf(acc[W4A16_TILES * self.row_tiles + m], ops.splat(ops.const_f32(SURPLUS), 4))
            sums = [arith.subf(acc[t * self.row_tiles + m], surplus) for t in range(W4A16_TILES)]
            values = [arith.mulf(s, w) for s, w in zip(sums, scale, strict=True)]
            at, first = slot * (cfg.columns * 2), self.tile[0] * (TILE_N * 2)
            if cfg.stage == 1:
                ops.store(out, ops.to_bf16(ops.silu_mul(*values)), at + group * 8, first)
            else:
                pair = [x for value in values for x in ops.elements(value)]
                ops.store(out, ops.to_bf16(ops.pack(pair)), at + group * 16, first)
