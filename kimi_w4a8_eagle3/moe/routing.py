"""Group the routed slots by expert into blocks of rows, with static sizes and no host sync, alike on any device.

A slot is `token * top_k + j`. Slots whose expert is not on this rank (-1) are left out everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Most slots that one program sorts. Beyond it several torch launches cost less than the program's bitonic sort.
ROUTE_IN_KERNEL = 2048


@dataclass(frozen=True)
class Routing:
    """Blocks of at most block_m rows of one expert each; only the first `num_blocks` entries of block_* are defined.

    order: int32 [S], slots sorted by (expert, slot); no padding, undefined past the routed ones.
    block_expert, block_first, block_rows: int32 [max_blocks]: expert, first index into `order`, number of rows.
    num_blocks: int32 [1].
    """

    order: torch.Tensor
    block_expert: torch.Tensor
    block_first: torch.Tensor
    block_rows: torch.Tensor
    num_blocks: torch.Tensor

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The tables in the order in which the kernels take them."""
        return self.order, self.block_expert, self.block_first, self.block_rows, self.num_blocks

    @property
    def max_blocks(self) -> int:
        """Static upper bound of num_blocks, which is the grid that is launched."""
        return self.block_expert.numel()


def max_blocks(slots: int, num_experts: int, block_m: int) -> int:
    """Return an upper bound of sum(ceil(rows of expert / block_m)) over every way to route `slots`."""
    experts = min(num_experts, slots)
    return min(slots, (slots + experts * (block_m - 1)) // block_m)


def empty_routing(slots: int, num_experts: int, block_m: int, device: torch.device) -> Routing:
    """Allocate uninitialised tables in one piece, for a kernel to fill."""
    blocks = max_blocks(slots, num_experts, block_m)
    wide = _aligned(blocks)
    storage = torch.empty(_aligned(slots) + 3 * wide + 1, dtype=torch.int32, device=device)
    order, expert, first, rows, num_blocks = storage.split([_aligned(slots), wide, wide, wide, 1])
    return Routing(order[:slots], expert[:blocks], first[:blocks], rows[:blocks], num_blocks)


def route(topk_ids: torch.Tensor, num_experts: int, block_m: int) -> Routing:
    """Sort the slots in plain torch.

    topk_ids: int32 [T, top_k]; ids outside [0, num_experts) are left out.
    """
    ids = topk_ids.reshape(-1).long()
    slots, device = ids.numel(), ids.device
    blocks = max_blocks(slots, num_experts, block_m)
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    expert, order = torch.sort(ids, stable=True)

    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    first = counts.cumsum(0) - counts
    expert_blocks = (counts + block_m - 1) // block_m
    block_start = expert_blocks.cumsum(0) - expert_blocks

    position = torch.arange(slots, device=device)
    rank = position - first[expert]
    starts_block = (expert < num_experts) & (rank % block_m == 0)
    # Rows that do not start a block are written to one spare entry past the end.
    block = torch.where(starts_block, block_start[expert] + rank // block_m, blocks)
    tables = torch.zeros(3, _aligned(blocks + 1), dtype=torch.int32, device=device)
    rows = torch.clamp(counts[expert] - rank, max=block_m)
    values = torch.stack([expert, position, rows]).to(torch.int32)
    tables.scatter_(1, block.expand(3, -1), values)
    num_blocks = block_start[num_experts:].to(torch.int32)
    return Routing(order.to(torch.int32), tables[0, :blocks], tables[1, :blocks], tables[2, :blocks], num_blocks)


def _aligned(count: int) -> int:
    """Round a number of int32 entries up to 16 bytes: Triton compiles a kernel anew for an unaligned pointer."""
    return -(-count // 4) * 4
