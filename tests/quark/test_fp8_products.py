"""The FP8 product against exact arithmetic on the same quantized values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_w4a8_eagle3.quark.fp8 import FP8, linear, quantize_rows

KINDS = FP8, torch.float8_e4m3fn  # of gfx942; of AMD Quark's checkpoints


@given(tokens=st.integers(1, 9), k=st.integers(1, 70), n=st.integers(1, 20), spread=st.floats(1e-3, 1e3))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=40, deadline=None)
def test_every_token_and_every_channel_has_its_own_scale(
    kind: torch.dtype, tokens: int, k: int, n: int, spread: float
) -> None:
    torch.manual_seed(k * n)
    largest = torch.finfo(kind).max
    weight, scale = quantize_rows(torch.randn(n, k) * torch.logspace(0, 3, n)[:, None], kind)
    x = torch.randn(tokens, k) * torch.logspace(0, 2, tokens)[:, None] * spread
    token_scale = x.abs().amax(1, keepdim=True) / largest
    rounded = (x / token_scale).clamp(-largest, largest).to(kind).double() * token_scale.double()
    expected = rounded @ (weight.double() * scale.double()).t()
    bound = rounded.abs() @ (weight.double().abs() * scale.double()).t()
    assert ((linear(x, weight, scale) - expected).abs() <= 1e-5 * bound + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_is_within_half_a_step_of_its_values(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    codes, scale = quantize_rows(rows, kind)
    assert scale.shape == (64, 1) and scale.dtype == torch.float32
    step = torch.maximum(rows.abs() / 8, scale * torch.finfo(kind).smallest_normal / 8)  # 3 bits after the first
    assert ((codes.float() * scale - rows).abs() <= step / 2 * (1 + 1e-5)).all()
    assert torch.equal(codes.float().abs().amax(1), torch.full((64,), torch.finfo(kind).max))


def test_shape_dtype_and_a_token_of_zeros() -> None:
    weight, scale = quantize_rows(torch.randn(6, 16))
    x = torch.randn(2, 3, 16).bfloat16()
    x[1, 2] = 0
    out = linear(x, weight, scale.view(-1))
    assert out.shape == (2, 3, 6) and out.dtype == torch.bfloat16
    assert torch.equal(out[1, 2], torch.zeros(6).bfloat16())
    one = linear(x[0, 1:2], weight, scale)
    assert torch.equal(one[0], out[0, 1])  # a token does not depend on its neighbours
    codes, _ = quantize_rows(torch.full((1, 4), 5e-43))  # its scale is rounded down by a third
    assert codes.float().isfinite().all()


def test_nan_stays_nan_in_its_token() -> None:
    weight, scale = quantize_rows(torch.randn(6, 16))
    x = torch.randn(2, 16)
    x[0, 3] = float("nan")
    out = linear(x, weight, scale)
    assert out[0].isnan().all() and out[1].isfinite().all()
