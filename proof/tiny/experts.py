"""Routed experts: tokens are sorted by expert, so that each expert's matmuls run once over all its tokens.

Three arithmetics of the same weights: plain (BF16 or training), fake-quantized (training that knows about INT4), and
exact W4A8 from the integers of a Quark checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TargetConfig

_INT8_MAX, _FP8_MAX = 127, 448.0
_INT4_STEPS = 7.5  # Quark spreads [-max, max] over 15 steps; +7.5 rounds to 8 and is clamped to 7


@dataclass(frozen=True)
class Int4Weights:
    """One layer from a Quark checkpoint: integers float32 [E, N, K] of INT4 or MXFP4, scales float32 [E, N] of rows."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor


class Experts(nn.Module):
    """All routed experts of one layer."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.moe_inter, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.moe_inter))
        self.int4: Int4Weights | None = None  # set: compute W4A8 from these integers
        self.fake_int4 = False  # set: train through the rounding to INT4

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, hidden], weights float32 and ids int64 [T, top_k] -> [T, hidden] in x's dtype."""
        layout = _Layout.of(ids, self.gate_up.shape[0], 64 if self.training else 16)
        grouped = _Gather.apply(x, layout)
        done = self._w4a8(grouped, layout.sizes) if self.int4 else self._plain(grouped, layout.sizes)
        slots = _Scatter.apply(done, layout).view(*ids.shape, x.shape[1])
        return (slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _plain(self, x: Tensor, sizes: list[int]) -> Tensor:
        rounding = fake_int4 if self.fake_int4 else lambda weight: weight
        gate, up = _linear(x, rounding(self.gate_up), sizes).chunk(2, -1)
        return _linear(F.silu(gate) * up, rounding(self.down), sizes)

    def _w4a8(self, x: Tensor, sizes: list[int]) -> Tensor:
        w = self.int4
        assert w is not None
        gate, up = w4a8_linear(x, w.gate_up, w.gate_up_scale, sizes).chunk(2, -1)
        return w4a8_linear(F.silu(gate) * up, w.down, w.down_scale, sizes)


def _linear(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Rows [R, K] in groups of `sizes`, group e times weight [E, N, K][e] -> [R, N]."""
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(sizes), weight.unbind(0), strict=True)])


def w4a8_linear(x: Tensor, weight: Tensor, scale: Tensor, sizes: list[int]) -> Tensor:
    """INT8 activations per row times INT4 weights; float32 holds the integer sums exactly (K * 127 * 8 < 2**24).

    x [R, K] in groups of `sizes`; weight float32 [E, N, K] of integers; scale [E, N]. Returns float32 [R, N].
    """
    x = x.float()
    step = x.abs().amax(-1, keepdim=True) / _INT8_MAX
    step = torch.where(step == 0, 1.0, step)
    return _linear(torch.round(x / step), weight, sizes) * step * scale.repeat_interleave(torch.tensor(sizes), 0)


def fake_int4(weight: Tensor) -> Tensor:
    """Round [E, N, K] as Quark will (FP8 per tensor, then INT4 per row); the gradient passes as if nothing happened."""
    with torch.no_grad():
        fp8_step = weight.abs().amax((1, 2), keepdim=True) / _FP8_MAX
        fp8 = (weight / fp8_step).to(torch.float8_e4m3fn).float()
        step = fp8.abs().amax(2, keepdim=True).clamp_min(1e-12) / _INT4_STEPS
        rounded = torch.round(fp8 / step).clamp(-8, 7) * step * fp8_step
    return weight + (rounded - weight).detach()


@dataclass(frozen=True)
class _Layout:
    """Places of each (token, slot) when tokens are grouped by expert.

    Every group is filled with zero rows up to a multiple of `align`: the CPU's matmul library compiles code for each
    new row count, so counts must repeat. Zero rows come out as zeros and add nothing to a weight's gradient.
    """

    sizes: list[int]  # rows of each expert, filled up
    source: Tensor  # [sum(sizes)] token of each row; T (a row of zeros) for the filling
    place: Tensor  # [T * top_k] row of each (token, slot)

    @staticmethod
    def of(ids: Tensor, experts: int, align: int) -> _Layout:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts)
        sizes = (counts + align - 1) // align * align
        shift = (sizes - counts).cumsum(0) - (sizes - counts)
        rows = torch.arange(flat.numel()) + shift[flat[order]]
        place = torch.empty_like(order).scatter_(0, order, rows)
        source = torch.full((int(sizes.sum()),), ids.shape[0]).scatter_(0, rows, order // ids.shape[1])
        return _Layout(sizes.tolist(), source, place)


class _Gather(torch.autograd.Function):
    """Tokens -> rows grouped by expert. Both directions are gathers, which are fast; a scatter-add is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: _Layout) -> Tensor:
        ctx.layout, ctx.tokens = layout, x.shape[0]
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, layout.source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        slots = grads[0].index_select(0, ctx.layout.place)
        return slots.view(ctx.tokens, -1, slots.shape[1]).sum(1), None


class _Scatter(torch.autograd.Function):
    """Rows grouped by expert -> (token, slot) order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: _Layout) -> Tensor:
        ctx.layout = layout
        return rows.index_select(0, layout.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        rows = grads[0].new_zeros(layout.source.numel(), grads[0].shape[1])
        return rows.index_copy_(0, layout.place, grads[0]), None
