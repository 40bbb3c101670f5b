"""Run the compiled FlyDSL kernels in the gfx942 interpreter: one class per kernel call, torch in and torch out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from support.flydsl_layout import low_sums

from kimi_w4a8_eagle3.moe.flydsl.configs import (
    OWN_ROWS,
    ByTokenConfig,
    ReduceConfig,
    RouteConfig,
    Stage1Config,
    Stage2Config,
)
from kimi_w4a8_eagle3.moe.routing import Routing, max_blocks, route
from proof.assembly import assembly
from proof.gfx942 import Buffer, Gfx942Device, Kernel, Memory, parse_kernel
from proof.sums import Stage1Sums, Stage2Sums


@lru_cache(maxsize=64)
def compiled(config: Any) -> Kernel:
    return parse_kernel(assembly(config))


@dataclass
class Device:
    """Buffers and launches; `order` is the order in which waves run."""

    order: Any = "lockstep"

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.kept = self.info = torch.empty(0)  # int8 rows and row info that stage 2 wrote

    def put(self, tensor: torch.Tensor) -> Buffer:
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        return self.memory.add(tensor.contiguous().numpy())

    def get(self, buffer: Buffer, dtype: torch.dtype, unwritten: int | None = None) -> torch.Tensor:
        values = torch.from_numpy(self.memory.read(buffer, unwritten))
        return values.view(dtype) if dtype == torch.bfloat16 else values

    def launch(self, config: Any, grid: tuple[int, ...], *args: Any) -> None:
        self.ran = Gfx942Device(self.memory).launch(compiled(config), grid, (256, 1, 1), args, order=self.order)

    def routing(self, routing: Routing) -> list[Buffer]:
        return [self.put(table) for table in tables_of(routing)]

    def route(
        self, x: torch.Tensor, ids: torch.Tensor, experts: int, tile_m: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(order, blocks, a8, info) of bfloat16 tokens x; a8 of none without columns."""
        (tokens, top_k), slots, hidden = ids.shape, ids.numel(), x.shape[1]
        cfg, blocks = RouteConfig(experts, top_k, tile_m, hidden), max_blocks(slots, experts, tile_m)
        sizes = ((tokens, hidden), np.int8), ((tokens, 2), np.int32), ((slots,), np.int32), ((blocks, 4), np.int32)
        a8, info, order, table = (self.memory.empty(*size) for size in sizes)
        given = [self.put(x) if hidden else 0, self.put(ids), a8, info, order, table, tokens, blocks]
        self.launch(cfg, cfg.grid(tokens), *given)
        kinds = (order, torch.int32), (table, torch.int32), (a8, torch.int8), (info, torch.int32)
        found = [self.get(buffer, kind, unwritten=0) for buffer, kind in kinds]
        return found[0], found[1], found[2], found[3]

    def _stage1_out(self, cfg: Stage1Config, slots: int) -> Buffer:
        sums = isinstance(cfg, Stage1Sums)
        return self.memory.empty((slots, cfg.inter * (2 if sums else 1)), np.int32 if sums else np.float32)

    def stage1(
        self, cfg: Stage1Config, a8: torch.Tensor, info: torch.Tensor, moe: Any, routed: Routing
    ) -> torch.Tensor:
        tokens = a8.shape[0]
        out = self._stage1_out(cfg, tokens * cfg.top_k)
        args = [self.put(a8), self.put(info), self.put(moe.w13), self.put(moe.s13), *self.routing(routed), out, tokens]
        self.launch(cfg, cfg.grid(routed.max_blocks), *args)
        return self.get(out, torch.float32, unwritten=0)

    def stage1_small(
        self, cfg: Stage1Config, x: torch.Tensor, ids: torch.Tensor, moe: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(h or sums, order, blocks) of bfloat16 tokens."""
        tokens, slots = len(x), ids.numel()
        out = self._stage1_out(cfg, slots)
        order, blocks = self.memory.empty((slots * OWN_ROWS,), np.int32), self.memory.empty((slots, 4), np.int32)
        given = self.put(x), self.put(ids), self.put(moe.w13), self.put(moe.s13), order, blocks, out, tokens
        self.launch(cfg, cfg.grid(slots), *given)
        kinds = (out, torch.float32), (order, torch.int32), (blocks, torch.int32)
        found = [self.get(buffer, kind, unwritten=0) for buffer, kind in kinds]
        return found[0], found[1], found[2]

    def stage2_token(
        self, cfg: ByTokenConfig, h: torch.Tensor, moe: Any, router: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """bfloat16 [T, hidden]."""
        out = self.memory.empty((len(ids), cfg.hidden), np.int16)
        given = self.put(h), self.put(moe.w2), self.put(moe.s2), self.put(router), self.put(ids), out
        self.launch(cfg, cfg.grid(len(ids)), *given)
        return self.get(out, torch.bfloat16)

    def stage2(
        self, cfg: Stage2Config, a8: torch.Tensor, info: torch.Tensor, moe: Any, routed: Routing, column: int = 0
    ) -> torch.Tensor:
        """Channels from `column` on.

        Where the kernel quantizes, a8 is float32, and info router weights that become scales.
        """
        slots, columns = a8.shape[0], cfg.hidden - column
        quantizes = not getattr(cfg, "given", False) and not (cfg.keeps and column)
        kept = self.memory.empty((slots, cfg.inter), np.int8) if quantizes else self.put(a8)
        out = self.memory.empty((slots, columns), np.float32 if isinstance(cfg, Stage2Sums) else np.float16)
        written, router = self.memory.empty((slots, 2), np.int32) if quantizes else self.put(info), self.put(info)
        tables = [self.put(a8), written, self.put(moe.w2), self.put(moe.s2), *self.routing(routed)]
        chunk = slots // cfg.top_k, column, columns
        self.launch(cfg, cfg.grid((routed.max_blocks, columns)), *tables, router, out, kept, *chunk)
        if quantizes:
            self.kept, self.info = self.get(kept, torch.int8, unwritten=0), self.get(written, torch.int32, unwritten=0)
            info.view(torch.int32).copy_(self.get(written, torch.int32, unwritten=0)[:, 0].view_as(info))
        return self.get(out, torch.float32, unwritten=0)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(a8, scale, low_sum) of tokens."""
        a8, pairs = self.route(x, torch.zeros(len(x), 1, dtype=torch.int32), 1, 16)[2:]
        return a8, pairs[:, 0].contiguous().view(torch.float32), pairs[:, 1]

    def reduce(self, slots: torch.Tensor, info: torch.Tensor, ids: torch.Tensor, experts: int = 5) -> torch.Tensor:
        """In two chunks of columns."""
        (tokens, top_k), hidden = ids.shape, slots.shape[1]
        cfg = ReduceConfig(hidden, top_k, experts, bf16=slots.dtype == torch.bfloat16)
        out = self.memory.empty((tokens, hidden), np.int16)
        given = self.put(info), self.put(ids), out
        first = hidden * 5 // 8
        for column, part in zip((0, first), slots.split([first, hidden - first], dim=1), strict=True):
            chunk = tokens, column, part.shape[1]
            self.launch(cfg, cfg.grid(chunk[::2]), self.put(part), *given, *chunk)
        return self.get(out, torch.bfloat16)


def tables_of(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, blocks) as the kernels take them, of torch's routing."""
    count = int(routing.num_blocks)
    blocks = torch.stack(
        [routing.block_expert, routing.block_first, routing.block_rows, torch.full_like(routing.block_rows, count)], 1
    )
    blocks[count:, :3] = 0
    return routing.order, blocks


def info_of(a8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """row_info int32 [R, 2] as the quantization kernel writes it."""
    return torch.stack([scale.float().view(torch.int32), low_sums(a8)], dim=1)


ORDERS = ("lockstep", "forward", "reverse", random.Random(7))

__all__ = ["ORDERS", "Device", "compiled", "info_of", "route", "tables_of"]
