"""The reference backend: the contract in plain torch, integer-exact, on any device.

Rows are grouped by expert into a padded grid `[experts in use, rows, K]` and multiplied as one batched matmul per
stage. Its operands are integers, so it is exact in float32 while every partial sum stays below 2**24. INT4 reaches that
at K = 16,513, more than Kimi-K2.5's 7,168. MXFP4 multiplies weights by the power of two of their block first, and
reaches it at K = 1,376 or, with shifts above 3, at K = 5. Beyond that the matmul runs in float64.
"""

from __future__ import annotations

from functools import reduce

import torch

from ..quark.packing import ABSENT, MAX_SHIFT, unpack_codes, unpack_reorder
from ..quark.weight_format import INT4, WeightFormat
from .contract import INT8_MAX, MoeShape, PreparedMoe, QuarkMoeWeights

LAYOUT = "reference-integers"
_INT8_SHIFT = 3  # 12 << 3 is the largest weight that fits INT8


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to INT8 symmetrically.

    x: [..., K]. Returns (integers as float32 [..., K], scale float32 [..., 1]); an all-zero row has scale 1. A row
    that holds NaN or Inf has a non-finite scale and yields NaN, so that a broken activation stays visible.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True)
    scale = scale / torch.full_like(scale, INT8_MAX)  # a GPU multiplies by the reciprocal of a Python number
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.round(x / scale), scale


def silu(gate: torch.Tensor) -> torch.Tensor:
    """Apply SiLU in float32 by the contract's formula.

    torch has two implementations, and the size of the batch decides which of them an element gets.
    """
    return gate / (1 + torch.exp(-gate))


def exact_matmul(a: torch.Tensor, w: torch.Tensor, weights: WeightFormat = INT4) -> torch.Tensor:
    """Multiply a float32 [B, M, K] by `integers` [B, N, K]; return exact sums [B, M, N] as float32 or float64."""
    largest = weights.largest
    if weights.block:
        largest <<= _INT8_SHIFT if w.dtype == torch.int8 else MAX_SHIFT
    dtype = torch.float32 if a.shape[-1] * INT8_MAX * largest <= 2**24 else torch.float64
    # These sums are exact in any order. `bmm` keeps one order, which is slower on a CPU.
    return torch.baddbmm(a.new_empty(1, 1, 1, dtype=dtype), a.to(dtype), w.to(dtype).transpose(1, 2), beta=0)


def integers(codes: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Return the integers [E, N, K] that a row scale multiplies: int8, or int16 for blocks with large shifts.

    codes and shift are those of QuarkMoeWeights.
    """
    if shift is None:
        return unpack_reorder(codes)
    wide = bool((shift > _INT8_SHIFT).any())
    blocks = unpack_codes(codes).to(torch.int16 if wide else torch.int8).view(*shift.shape, -1)
    return torch.where(shift[..., None] < ABSENT, blocks << shift[..., None].to(blocks.dtype), 0).flatten(-2)


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
        """Unpack the codes to integers, with the shifts of their blocks applied."""
        w13, w2 = integers(weights.w13, weights.shift13), integers(weights.w2, weights.shift2)
        more = self.prepare(weights.more) if weights.more else None
        return PreparedMoe(weights.shape, LAYOUT, w13, w2, weights.s13, weights.s2, more=more)

    def forward(
        self, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run both stages; see MoeBackend.forward for shapes."""
        hidden, inter = moe.shape.hidden, moe.shape.inter
        experts, grid, used, cells = _group_rows(topk_ids)
        rows, row_scale = quantize_rows(x)
        token_of = grid // topk_ids.shape[1]

        def product(rows: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            acc = exact_matmul(rows, _pick(w, experts), moe.shape.weights)
            return acc.float() * scale * _pick(s, experts).unsqueeze(1)

        given = _pick(rows, token_of), _pick(row_scale, token_of)
        gate_up = reduce(torch.add, [product(*given, part.w13, part.s13) for part in moe.parts])
        act = silu(gate_up[..., :inter]) * gate_up[..., inter:]

        given = quantize_rows(act)
        down = reduce(torch.add, [product(*given, part.w2, part.s2) for part in moe.parts])
        weighted = down * _pick(topk_weights.reshape(-1), grid).float().unsqueeze(-1)
        slots = torch.zeros(topk_ids.numel(), hidden, dtype=torch.float32, device=x.device)
        slots[used] = weighted.view(-1, hidden).index_select(0, cells)  # not index_add_, which uses atomics on a GPU
        return slots.view(*topk_ids.shape, hidden).sum(1).to(torch.bfloat16)
