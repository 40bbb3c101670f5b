"""The reference backend against a loop that follows the contract one number at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.far_blocks import FarLayer
from support.packing import pack_reorder

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend, exact_matmul, integers, quantize_rows
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from kimi_w4a8_lab.kernels.random_layers import random_layer

# Why an element may differ from the loop, and by how much.
BFLOAT16 = 2**-8  # the output's rounding: half a unit in the last of bfloat16's 8 bits
# Six factors, silu of a gate below 1, at most three sums, each half a unit in the last of 24 bits: below eight units.
FLOAT32 = 2**-20
TIE = 127 * FLOAT32  # the same error of an activation, as a part of its INT8 step; only there may a step more be right


def layer(shape: MoeShape, seed: int) -> tuple[QuarkMoeWeights, torch.Tensor, torch.Tensor]:
    """Random weights as Quark words, and the same as int8 [E, 2I, H] and [E, H, I]."""
    gen = torch.Generator().manual_seed(seed)
    experts, hidden, inter = shape.num_experts, shape.hidden, shape.inter
    w13 = torch.randint(-8, 8, (experts, 2 * inter, hidden), generator=gen, dtype=torch.int8)
    w2 = torch.randint(-8, 8, (experts, hidden, inter), generator=gen, dtype=torch.int8)
    s13 = torch.rand(experts, 2 * inter, generator=gen) * 0.01 + 1e-3
    s2 = torch.rand(experts, hidden, generator=gen) * 0.01 + 1e-3
    return QuarkMoeWeights(shape, pack_reorder(w13), pack_reorder(w2), s13, s2), w13, w2


def naive_quantize(row: list[float]) -> tuple[list[int], float]:
    """Round half to even by Python's own rounding, in float32 steps."""
    x = torch.tensor(row, dtype=torch.float32)
    peak = float(x.abs().max()) if len(row) else 0.0
    scale = float(torch.tensor(peak, dtype=torch.float32) / 127) if peak else 1.0
    return [round(float(v / torch.tensor(scale, dtype=torch.float32))) for v in x], scale


def naive_forward(x, w13, w2, s13, s2, topk_weights, topk_ids) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, one slot, one channel at a time, accumulators as Python integers.

    Returns the output before its rounding to bfloat16, and how far float32 arithmetic may honestly move each element.
    """
    tokens, hidden = x.shape
    inter = w2.shape[2]
    out, slack = torch.zeros(2, tokens, hidden, dtype=torch.double)
    for t in range(tokens):
        a, sx = naive_quantize(x[t].tolist())
        for slot in range(topk_ids.shape[1]):
            e = int(topk_ids[t, slot])
            if e < 0:
                continue
            y = [
                sum(p * int(q) for p, q in zip(a, w13[e, n], strict=True)) * sx * float(s13[e, n])
                for n in range(2 * inter)
            ]
            act = [y[i] / (1 + math.exp(-y[i])) * y[inter + i] for i in range(inter)]
            b, sa = naive_quantize(act)
            # The loop's activations are double, the backend's float32: within TIE of a rounding tie they may part.
            ties = [abs(abs(a / sa) % 1 - 0.5) < TIE for a in act]
            for n in range(hidden):
                factor = sa * float(s2[e, n]) * float(topk_weights[t, slot])
                products = [p * int(q) for p, q in zip(b, w2[e, n], strict=True)]
                out[t, n] += sum(products) * factor
                step = sum(abs(int(q)) for q, tie in zip(w2[e, n], ties, strict=True) if tie)
                slack[t, n] += (step + FLOAT32 * sum(map(abs, products))) * factor
    return out, slack


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 5),
    experts=st.integers(1, 4),
    top_k=st.integers(1, 3),
    hidden=st.sampled_from([8, 16, 24]),
    inter=st.sampled_from([8, 16]),
    seed=st.integers(0, 2**16),
)
def test_matches_the_loop(tokens, experts, top_k, hidden, inter, seed):
    shape = MoeShape(experts, hidden, inter, top_k)
    weights, w13, w2 = layer(shape, seed)
    gen = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(tokens, hidden, generator=gen).to(torch.bfloat16)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=gen, dtype=torch.int32)
    router = torch.rand(tokens, top_k, generator=gen)
    backend = ReferenceBackend()
    out = backend.forward(x, backend.prepare(weights), router, ids)
    expected, slack = naive_forward(x.float(), w13, w2, weights.s13, weights.s2, router, ids)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= BFLOAT16 * expected.abs() + slack).all()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))
def test_accumulators_are_the_integers(batch, rows, channels, seed):
    """At Kimi's K = 7168 with the largest possible operands, where float32 has no bit to spare."""
    gen = torch.Generator().manual_seed(seed)
    a = torch.randint(-127, 128, (batch, rows, 7168), generator=gen)
    w = torch.randint(-8, 8, (batch, channels, 7168), generator=gen)
    a[0, 0], w[0, 0] = 127, -8
    exact = torch.einsum("bmk,bnk->bmn", a, w)
    assert torch.equal(exact_matmul(a.float(), w.to(torch.int8)).long(), exact)


@pytest.mark.parametrize(("k", "dtype"), [(16_513, torch.float32), (16_514, torch.float64)])
def test_accumulators_stay_exact_beyond_float32(k, dtype):
    """The largest sum, less one weight: odd, and beyond 2**24 float32 has even numbers only."""
    w = torch.full((1, 1, k), -8, dtype=torch.int8)
    w[0, 0, 0] = -7
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN: nothing may be read from it
    try:
        sums = exact_matmul(torch.full((1, 1, k), 127.0), w)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sums.dtype == dtype and int(sums) == -127 * (8 * k - 1)


def test_mxfp4_accumulators_are_exact_at_the_bound():
    """The largest weights and activations at K = 11,008 give the largest sum that int32 holds."""
    shape = MoeShape(1, 11_008, 32, 1, weights=MXFP4)
    weights = random_layer(shape, torch.device("cpu"))
    weights.w13.fill_(0x77)
    weights.shift13.fill_(7)
    w = integers(weights.w13, weights.shift13)
    sums = exact_matmul(torch.full((1, 1, 11_008), 127.0), w, MXFP4)
    assert w.dtype == torch.int16 and set(sums.flatten().tolist()) == {127 * 12 * 2**7 * 11_008}
    assert 127 * 12 * 2**7 * 11_008 < 2**31 <= 127 * 12 * 2**7 * (11_008 + 32)


def test_mxfp4_matches_the_loop():
    shape = MoeShape(2, 64, 32, 2, weights=MXFP4)
    weights = random_layer(shape, torch.device("cpu"))
    w13, w2 = integers(weights.w13, weights.shift13), integers(weights.w2, weights.shift2)
    assert int(weights.shift13.max()) == 7 and w13.dtype == torch.int16
    x, router = torch.randn(3, 64).to(torch.bfloat16), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]], dtype=torch.int32)
    backend = ReferenceBackend()
    out = backend.forward(x, backend.prepare(weights), router, ids)
    expected, slack = naive_forward(x.float(), w13, w2, weights.s13, weights.s2, router, ids)
    assert ((out.double() - expected).abs() <= BFLOAT16 * expected.abs() + slack).all()


def test_rounding_is_half_to_even_and_zero_rows_are_zero():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6])
    values, scale = quantize_rows(x)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2], [0] * 6]
    assert scale.flatten().tolist() == [1.0, 1.0]


def test_no_tokens_and_no_local_experts():
    shape = MoeShape(2, 16, 8, 2)
    weights, _, _ = layer(shape, 0)
    backend = ReferenceBackend()
    prepared = backend.prepare(weights)
    empty = backend.forward(
        torch.empty(0, 16, dtype=torch.bfloat16), prepared, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)
    )
    assert empty.shape == (0, 16)
    elsewhere = backend.forward(
        torch.randn(3, 16).to(torch.bfloat16), prepared, torch.ones(3, 2), torch.full((3, 2), -1, dtype=torch.int32)
    )
    assert not elsewhere.any()


def test_a_broken_activation_stays_visible_and_alone():
    shape = MoeShape(2, 16, 8, 1)
    weights, _, _ = layer(shape, 0)
    backend = ReferenceBackend()
    x = torch.randn(3, 16).to(torch.bfloat16)
    x[1, 3] = float("nan")
    out = backend.forward(x, backend.prepare(weights), torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("span", [11, 12, 13, 20, 30, 60])
def test_rows_of_many_octaves_are_the_values_of_the_files(span: int) -> None:
    layer, backend = FarLayer(MoeShape(3, 128, 64, 2, weights=MXFP4), span), ReferenceBackend()
    assert (layer.weights.more is not None) == (span > 11)
    x, router, ids = layer.batch
    found = backend.forward(x, backend.prepare(layer.weights), router, ids)
    assert float(layer.errors(found).max()) < 4e-3
