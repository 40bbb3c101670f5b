# mypy: disable-error-code="no-untyped-def"
"""The sort of a decode batch's slots by expert, in one launch: the Triton backend's sorting kernel, compiled ahead."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...base.errors import KimiError
from ..triton.compile import offline_driver, target_of
from ..triton.kernels import _route_block
from .configs import RouteConfig
from .objects import ARCH
from .toolchain import environment

PARAMETERS = 7  # of the kernel; what Triton adds to them is null
NUM_WARPS = 8


# ids lie where SGLang has them, the tables where routing.empty_routing aligned them
@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["ids"])
def route_slots(
    ids,
    order,
    block_expert,
    block_first,
    block_rows,
    num_blocks,
    slots,
    E: tl.constexpr,
    EP: tl.constexpr,
    SP: tl.constexpr,
    BM: tl.constexpr,
):
    """routing.route for `slots` slots of `ids`."""
    _route_block(ids, order, block_expert, block_first, block_rows, num_blocks, slots, E, EP, SP, BM)


def constants(config: RouteConfig) -> dict[str, Any]:
    """Triton's constants and options of a configuration."""
    experts = triton.next_power_of_2(config.experts + 1)
    return {"E": config.experts, "EP": experts, "SP": config.slots, "BM": config.tile_m, "num_warps": NUM_WARPS}


def compile_route(config: RouteConfig) -> Any:
    """Triton's compiled kernel: `asm["hsaco"]` is the code object, `metadata.shared` its dynamic LDS; needs no GPU."""
    tensor = torch.empty(16, dtype=torch.int32, device="meta")
    # Triton 3.9 announces in a warning that the default will change; the sort has no floats.
    with environment(TRITON_DEFAULT_FP_FUSION="1"), offline_driver(target_of(ARCH)):
        kernel = route_slots.warmup(*[tensor] * 6, 1, grid=(1,), **constants(config))
    # Triton 3.7 to 3.9 name different kinds of it.
    if any(getattr(kernel.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
        raise KimiError(f"Triton's {config!r} wants scratch memory, which nobody gives it")
    return kernel
