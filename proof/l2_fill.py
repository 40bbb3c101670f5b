"""Bytes that the XCDs' L2 caches fetch in a prefill, with and without the order that keeps neighbours together.

A simulation: workgroups go round the eight XCDs by their number, those that run on an XCD at a time walk their rows and
weights in step, so that each of them fetches what the others do not; nothing outlives them. Routing is random.
"""

from __future__ import annotations

import numpy as np

from kimi_w4a8_eagle3.machine.hardware import Gpu
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.flydsl.configs import XCDS, Stage1Config, Stage2Config

Work = tuple[int, int]  # row block, column


def l2_fill(gpu: Gpu, shape: MoeShape, tokens: int, config: Stage1Config | Stage2Config, groups: int) -> int:
    """Bytes fetched by all XCDs in one stage; `groups` workgroups run on a compute unit at a time."""
    experts, rows = _blocks(shape, tokens, config.tile_m)
    stage1 = isinstance(config, Stage1Config)
    columns = (shape.inter if stage1 else shape.hidden) // config.tile_n
    row_bytes = shape.hidden if stage1 else shape.inter
    weight_bytes = config.tile_n * (shape.hidden if stage1 else shape.inter // 2)  # of gate and up, or of down
    at_a_time, total = gpu.compute_units // XCDS * groups, 0
    for works in _orders(len(rows), columns, config):
        for start in range(0, len(works), at_a_time):
            running = works[start : start + at_a_time]
            weights = {(experts[block], column) for block, column in running}
            total += len(weights) * weight_bytes
            for size in (1, 4):  # stage 2 takes its rows for the first columns as float32, and quantizes them
                blocks = {block for block, column in running if size == (1 if stage1 or column else 4)}
                read = np.concatenate([np.empty(0), *(rows[block] for block in blocks)])
                total += len(np.unique(read)) * row_bytes * size
    return total


def _blocks(shape: MoeShape, tokens: int, tile_m: int) -> tuple[list[int], list[np.ndarray]]:
    """The expert and the rows (tokens; in stage 2 a slot is as good as its token) of each block."""
    generator = np.random.default_rng(0)
    chosen = np.argpartition(generator.random((tokens, shape.num_experts)), shape.top_k)[:, : shape.top_k]
    experts, rows = [], []
    for expert in range(shape.num_experts):
        mine = np.flatnonzero((chosen == expert).any(1))
        for start in range(0, len(mine), tile_m):
            experts.append(expert)
            rows.append(mine[start : start + tile_m])
    return experts, rows


def _orders(blocks: int, columns: int, config: Stage1Config | Stage2Config) -> list[list[Work]]:
    """Work of each XCD, in order."""
    by_block = [(block, column) for block in range(blocks) for column in range(columns)]
    by_column = [(block, column) for column in range(columns) for block in range(blocks)]
    if not config.by_xcd:
        return [by_block[xcd::XCDS] for xcd in range(XCDS)]
    if isinstance(config, Stage1Config):
        return [[by_block[n] for n in part] for part in np.array_split(np.arange(len(by_block)), XCDS)]
    shares = np.array_split(np.arange(blocks), XCDS)
    return [[by_column[column * blocks + n] for column in range(columns) for n in share] for share in shares]
