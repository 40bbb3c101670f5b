"""The reference backend: the contract in plain torch, integer-exact, on any device.

Rows are grouped by expert into a padded grid `[experts in use, rows, K]` and multiplied as one batched matmul per
stage. The matmul runs in float32: its operands are integers with |a8| <= 127 and |w4| <= 8, so every partial sum
stays below 2**24 and is exact for K <= 16,513 (Kimi-K2.5 has K <= 7,168); beyond that it runs in float64.
"""

from __future__ import annotations

import torch

from ..quark.packing import unpack_reorder
from .contract import INT8_MAX, MoeShape, PreparedMoe, QuarkMoeWeights

LAYOUT = "reference-int8"
_FLOAT32_EXACT_K = 2**24 // (INT8_MAX * 8)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to INT8 symmetrically.

    x: [..., K]. Returns (integers as float32 [..., K], scale float32 [..., 1]); an all-zero row has scale 1. A row
    that holds NaN or Inf has a non-finite scale and yields NaN, so that a broken activation stays visible.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / INT8_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.round(x / scale), scale


def silu(gate: torch.Tensor) -> torch.Tensor:
    """Apply SiLU in float32 by the contract's formula.

    torch has two implementations, and the size of the batch decides which of them an element gets.
    """
    return gate / (1 + torch.exp(-gate))


def exact_matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply a float32 [B, M, K] by w int8 [B, N, K]; return exact sums [B, M, N] as float32 or float64."""
    dtype = torch.float32 if a.shape[-1] <= _FLOAT32_EXACT_K else torch.float64
    # These sums are exact in any order. `bmm` keeps one order, slower on a CPU (laptop/cpu/batch_invariant.py).
    return torch.baddbmm(a.new_empty(1, 1, 1, dtype=dtype), a.to(dtype), w.to(dtype).transpose(1, 2), beta=0)


def _group_rows(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group the routed slots by expert.

    topk_ids: [T, top_k], -1 = not on this rank. Returns (experts in use [B], grid [B, M] of slot numbers `t * top_k +
        s`, the routed slots [S], the grid cell of each routed slot [S]). Unused cells hold slot 0.
    """
    flat = topk_ids.reshape(-1)
    slots = torch.nonzero(flat >= 0).squeeze(1)
    experts, group, counts = torch.unique(flat[slots], return_inverse=True, return_counts=True)
    slots = slots[torch.argsort(group)]
    width = int(counts.max()) if counts.numel() else 0
    row = torch.arange(experts.numel(), device=flat.device) * width
    cells = torch.arange(slots.numel(), device=flat.device)
    cells += (row - counts.cumsum(0) + counts).repeat_interleave(counts)
    grid = torch.zeros(experts.numel() * width, dtype=torch.long, device=flat.device)
    grid[cells] = slots
    return experts.long(), grid.view(experts.numel(), width), slots, cells


def _pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return `table[index]`, six times as fast on a CPU."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


class ReferenceBackend:
    """Integer-exact torch implementation that the other backends are compared with and that runs on a CPU."""

    name = "reference"

    def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
        """Return None: any shape runs on any device that torch runs on."""
        return None

    def prepare(self, weights: QuarkMoeWeights) -> PreparedMoe:
        """Unpack Quark's int32 words to int8 [E, N, K]."""
        return PreparedMoe(
            shape=weights.shape,
            layout=LAYOUT,
            w13=unpack_reorder(weights.w13),
            w2=unpack_reorder(weights.w2),
            s13=weights.s13,
            s2=weights.s2,
        )

    def forward(
        self, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run both stages; see MoeBackend.forward for shapes."""
        hidden, inter = moe.shape.hidden, moe.shape.inter
        experts, grid, used, cells = _group_rows(topk_ids)
        rows, row_scale = quantize_rows(x)
        token_of = grid // topk_ids.shape[1]

        acc = exact_matmul(_pick(rows, token_of), _pick(moe.w13, experts))
        gate_up = acc.float() * _pick(row_scale, token_of) * _pick(moe.s13, experts).unsqueeze(1)
        act = silu(gate_up[..., :inter]) * gate_up[..., inter:]

        act_rows, act_scale = quantize_rows(act)
        acc = exact_matmul(act_rows, _pick(moe.w2, experts))
        down = acc.float() * act_scale * _pick(moe.s2, experts).unsqueeze(1)

        weighted = down * _pick(topk_weights.reshape(-1), grid).float().unsqueeze(-1)
        slots = torch.zeros(topk_ids.numel(), hidden, dtype=torch.float32, device=x.device)
        slots[used] = weighted.view(-1, hidden).index_select(0, cells)  # not index_add_, which uses atomics on a GPU
        return slots.view(*topk_ids.shape, hidden).sum(1).to(torch.bfloat16)
