"""FP8 products with a scale for each token and each output channel, in plain torch.

The products of two FP8 values are exact in float32. Sums and scales are float32, and the result is rounded once.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fnuz  # of gfx942


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to FP8 symmetrically.

    x: [..., K]. Returns (codes [..., K], scale float32 [..., 1]). A row of zeros has scale 1, and NaN stays NaN.
    """
    largest = torch.finfo(dtype).max
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    # A scale next to zero is itself rounded by up to a third, and what exceeds the largest value would become NaN.
    return (wide / scale).clamp(-largest, largest).to(dtype), scale


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., K] by an FP8 weight [N, K] with a scale for each of its rows, [N] or [N, 1]; keep x's dtype."""
    codes, token_scale = quantize_rows(x, weight.dtype)
    return (codes.float() @ weight.float().t() * token_scale * scale.float().view(-1)).to(x.dtype)
