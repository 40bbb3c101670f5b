"""The FP8 product on the CPU against exact arithmetic on the same quantized values."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_w4a8_laptop.cpu.fp8_linear import FP8_MAX, linear


def quantized_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [K, N] as SGLang keeps it (transposed), and a scale for each of the N channels."""
    weight = torch.randn(rows, columns)
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    return (weight / scale).to(torch.float8_e4m3fn).t(), scale


@given(tokens=st.integers(1, 9), k=st.integers(1, 70), n=st.integers(1, 20), spread=st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_every_token_has_its_own_scale(tokens: int, k: int, n: int, spread: float) -> None:
    torch.manual_seed(k * n)
    weight, scale = quantized_weight(n, k)
    x = torch.randn(tokens, k) * torch.logspace(0, 2, tokens)[:, None] * spread
    token_scale = x.abs().amax(1, keepdim=True) / FP8_MAX
    rounded = (x / token_scale).to(torch.float8_e4m3fn).double() * token_scale.double()
    expected = rounded @ (weight.double() * scale.double().t())
    bound = rounded.abs() @ (weight.double().abs() * scale.double().t())
    assert ((linear(x, weight, scale) - expected).abs() <= 1e-5 * bound + 1e-30).all()


def test_shape_dtype_and_a_token_of_zeros() -> None:
    weight, scale = quantized_weight(6, 16)
    x = torch.randn(2, 3, 16).bfloat16()
    x[1, 2] = 0
    out = linear(x, weight, scale.view(-1))
    assert out.shape == (2, 3, 6) and out.dtype == torch.bfloat16
    assert torch.equal(out[1, 2], torch.zeros(6).bfloat16())
    one = linear(x[0, 1:2], weight, scale)
    assert torch.equal(one[0], out[0, 1])  # a token does not depend on its neighbours
