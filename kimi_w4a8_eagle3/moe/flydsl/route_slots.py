# mypy: disable-error-code="no-untyped-def"
"""Routing for the FlyDSL backend by the Triton backend's sorting kernel: one launch for a decode batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from ..routing import ROUTE_IN_KERNEL, Routing, empty_routing, route
from ..triton.compile import offline_driver, target_of
from ..triton.kernels import _route_block


@triton.jit(do_not_specialize=["slots"])
def _route_slots(
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
    _route_block(ids, order, block_expert, block_first, block_rows, num_blocks, slots, E, EP, SP, BM)


def route_slots(ids: torch.Tensor, num_experts: int, tile_m: int) -> Routing:
    """routing.route for topk_ids int32 [T, top_k]; batches too large for one program are sorted by torch."""
    slots = ids.numel()
    if slots > ROUTE_IN_KERNEL:
        return route(ids, num_experts, tile_m)
    routing = empty_routing(slots, num_experts, tile_m, ids.device)
    _route_slots[(1,)](ids, *routing.tables, slots, **_constants(slots, num_experts, tile_m))
    return routing


def _constants(slots: int, num_experts: int, tile_m: int) -> dict[str, Any]:
    return {
        "E": num_experts,
        "EP": triton.next_power_of_2(num_experts + 1),
        "SP": max(triton.next_power_of_2(slots), 32),
        "BM": tile_m,
        "num_warps": 8,
    }


def compile_routes(num_experts: int, batches: Iterable[tuple[int, int]]) -> int:
    """Compile what `route_slots` launches for (slots, tile_m); needs no GPU. Returns how many kernels that are."""
    in_kernel = [(slots, tile_m) for slots, tile_m in batches if slots <= ROUTE_IN_KERNEL]
    wanted = {tuple(_constants(slots, num_experts, tile_m).items()) for slots, tile_m in in_kernel}
    ids = torch.empty(16, dtype=torch.int32, device="meta")
    with offline_driver(target_of("gfx942")):
        for constants in wanted:
            _route_slots.warmup(*[ids] * 6, 1, grid=(1,), **dict(constants))
    return len(wanted)
