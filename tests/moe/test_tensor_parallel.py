"""Tensor parallelism in the MoE layer: what it may change and what it may not.

Exact for every size: each rank's gate and up accumulators, and the sum of the ranks' integer accumulators of down for
the same INT8 activations. Not exact: a rank quantizes its own slice of the activations with its own (finer
or equal) scale, so the layer's output moves by a part of the INT8 error; it is equal where the scales agree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.packing import pack_reorder, slice_packed_columns, slice_rows

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.quark.packing import unpack_reorder

SIZES = [1, 2, 4]


def random_layer(experts: int, hidden: int, inter: int, top_k: int, seed: int) -> QuarkMoeWeights:
    """Gaussian weights quantized to INT4 with one scale a row, as Quark does it."""
    generator = torch.Generator().manual_seed(seed)

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(experts, rows, columns, generator=generator)
        scale = weight.abs().amax(dim=-1) / 7
        values = (weight / scale.unsqueeze(-1)).round().to(torch.int8)
        return pack_reorder(values), scale / columns**0.5

    w13, s13 = quantized(2 * inter, hidden)
    w2, s2 = quantized(hidden, inter)
    return QuarkMoeWeights(MoeShape(experts, hidden, inter, top_k), w13, w2, s13, s2)


def rank_slice(layer: QuarkMoeWeights, rank: int, tp: int) -> QuarkMoeWeights:
    """Gate and up by rows, down by packed columns; down's scales belong to its rows and stay whole."""
    return QuarkMoeWeights(
        shape=replace(layer.shape, inter=layer.shape.inter // tp),
        w13=slice_rows(layer.w13, rank, tp, parts=2),
        w2=slice_packed_columns(layer.w2, rank, tp),
        s13=slice_rows(layer.s13, rank, tp, dim=-1, parts=2),
        s2=layer.s2,
    )


def routed_tokens(shape: MoeShape, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, shape.num_experts, generator=generator).softmax(dim=-1).topk(shape.top_k)
    return x, weights, ids.int()


def forward(layer: QuarkMoeWeights, tp: int, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The all-reduced output of tp ranks, each of which rounds its part to bfloat16."""
    backend = ReferenceBackend()
    x, weights, ids = call
    parts = [backend.forward(x, backend.prepare(rank_slice(layer, r, tp)), weights, ids).float() for r in range(tp)]
    return torch.stack(parts).sum(dim=0)


@pytest.mark.parametrize("tp", SIZES)
def test_output_is_bit_equal_where_the_ranks_scales_agree(tp: int) -> None:
    """Ranks that hold the same rows have the same activations, hence TP 1's scale; sums of equal parts are exact."""
    quarter = random_layer(8, 128, 64, 4, seed=3)  # 64: whole vectors, see the remark on silu above
    gate, up = quarter.w13.chunk(2, dim=1)
    s_gate, s_up = quarter.s13.chunk(2, dim=1)
    layer = QuarkMoeWeights(
        shape=replace(quarter.shape, inter=256),
        w13=torch.cat([gate] * 4 + [up] * 4, dim=1),
        w2=torch.cat([quarter.w2] * 4, dim=2),
        s13=torch.cat([s_gate] * 4 + [s_up] * 4, dim=1),
        s2=quarter.s2,
    )
    call = routed_tokens(layer.shape, 12, seed=4)
    assert torch.equal(forward(layer, tp, call), forward(layer, 1, call))
    assert forward(layer, tp, call).abs().max() > 0


@pytest.mark.parametrize("tp", SIZES)
def test_output_moves_less_than_the_int8_error(tp: int) -> None:
    layer = random_layer(8, 256, 256, 4, seed=5)
    call = routed_tokens(layer.shape, 24, seed=6)
    exact = unquantized_activations(layer, call)
    error = (forward(layer, tp, call) - exact).norm() / exact.norm()
    error_tp1 = (forward(layer, 1, call) - exact).norm() / exact.norm()
    # Slices have finer scales, so more ranks quantize better; 5% for the rounding of each part to bfloat16.
    assert error <= 1.05 * error_tp1
    assert error_tp1 < 0.03


def unquantized_activations(
    layer: QuarkMoeWeights, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The layer with its INT4 weights and float32 activations."""
    x, weights, ids = call
    w13 = unpack_reorder(layer.w13).float() * layer.s13.unsqueeze(-1)
    w2 = unpack_reorder(layer.w2).float() * layer.s2.unsqueeze(-1)
    gate, up = torch.einsum("th,enh->etn", x.float(), w13).chunk(2, dim=-1)
    every = torch.einsum("eti,ehi->teh", torch.nn.functional.silu(gate) * up, w2)
    routed = every.gather(1, ids.long().unsqueeze(-1).expand(-1, -1, layer.shape.hidden))
    return (routed * weights.unsqueeze(-1)).sum(dim=1)
