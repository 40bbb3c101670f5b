"""Stage 1, h = silu(gate) * up for the routed rows: the kernel of all variants.

`stage1_decode` (tile_m 16, 32) is bound by reading weights, `stage1_prefill` (64, 128) by the matrix unit.
"""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import ops as ops
from .block import Arguments, RoutingAddresses
from .configs import WAVES, Stage1Config
from .stage1_decode import Stage1Decode
from .stage1_prefill import Stage1Prefill
from .stage1_small import Stage1Small


def build(cfg: Stage1Config) -> Any:
    """Build the kernel of one configuration, for `toolchain.compiled`: (seven addresses, tokens)."""
    workgroup: Any = (Stage1Small if cfg.experts else Stage1Decode) if cfg.decode else Stage1Prefill

    @flyc.kernel(known_block_size=[WAVES * ops.WAVE, 1, 1])
    def moe_stage1(
        rows: fx.Int64,
        row_info: fx.Int64,
        weights: fx.Int64,
        w_scale: fx.Int64,
        order: fx.Int64,
        blocks: fx.Int64,
        out: fx.Int64,
        tokens: fx.Int32,
    ) -> None:
        ops.keep(rows, row_info, weights, w_scale, order, blocks, out, tokens)
        routing = RoutingAddresses(order, blocks)
        workgroup(cfg, Arguments(rows, row_info, weights, w_scale, routing, out, tokens)).run()

    return ops.launcher(moe_stage1, cfg.hints)
