"""Stage 1, h = silu(gate) * up for the routed rows: the kernel of all variants.

`stage1_decode` (tile_m 16, 32) is bound by reading weights, `stage1_prefill` (64, 128) by the matrix unit.
"""

from __future__ import annotations

from typing import Any

from . import ops as ops
from .configs import Stage1Config
from .kernel_arguments import Stage1Arguments
from .launcher import launcher
from .stage1_decode import Stage1Decode
from .stage1_prefill import Stage1Prefill
from .stage1_small import Stage1Small


def build(cfg: Stage1Config) -> Any:
    """Build the kernel of one configuration, for `toolchain.compiled`."""
    workgroup = (Stage1Small if cfg.experts else Stage1Decode) if cfg.decode else Stage1Prefill

    def emit(args: Stage1Arguments) -> None:
        ops.keep(*vars(args).values())
        workgroup(cfg, args).run()

    return launcher("moe_stage1", Stage1Arguments, emit, cfg.hints)
