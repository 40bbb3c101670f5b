"""Stage 1, h = silu(gate) * up for the routed rows: the launcher of both variants.

`flydsl_stage1_decode` (tile_m 16, 32) is bound by reading weights, `flydsl_stage1_prefill` (64, 128) by the matrix
unit.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import ops as ops
from .block import RoutingAddresses
from .stage1_config import WAVES, Arguments, Stage1Config
from .stage1_decode import Stage1Decode
from .stage1_prefill import Stage1Prefill
from .toolchain import cache_tag


def build(cfg: Stage1Config) -> Any:
    """The launcher of one configuration: (ten addresses, tokens, blocks launched, stream)."""
    workgroup: Any = Stage1Decode if cfg.decode else Stage1Prefill
    tag = cache_tag(cfg)

    @flyc.kernel(known_block_size=[WAVES * ops.WAVE, 1, 1])
    def moe_stage1(
        rows: fx.Int64,
        row_info: fx.Int64,
        weights: fx.Int64,
        w_scale: fx.Int64,
        order: fx.Int64,
        block_expert: fx.Int64,
        block_first: fx.Int64,
        block_rows: fx.Int64,
        num_blocks: fx.Int64,
        out: fx.Int64,
        tokens: fx.Int32,
    ) -> None:
        ops.identify(tag)
        routing = RoutingAddresses(order, block_expert, block_first, block_rows, num_blocks)
        workgroup(cfg, Arguments(rows, row_info, weights, w_scale, routing, out, tokens)).run()

    @flyc.jit
    def launch(
        rows: fx.Int64,
        row_info: fx.Int64,
        weights: fx.Int64,
        w_scale: fx.Int64,
        order: fx.Int64,
        block_expert: fx.Int64,
        block_first: fx.Int64,
        block_rows: fx.Int64,
        num_blocks: fx.Int64,
        out: fx.Int64,
        tokens: fx.Int32,
        blocks: fx.Int32,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        moe_stage1(
            rows, row_info, weights, w_scale, order, block_expert, block_first, block_rows, num_blocks, out, tokens
        ).launch(grid=cfg.grid(blocks), block=(WAVES * ops.WAVE, 1, 1), stream=stream)

    launch.compile_hints = cfg.hints
    return launch
