"""Stand-ins of rotary embeddings, which work in place.

AITER's is a module whose cosines have the model's dtype, over an operator. sgl_kernel's is the operator alone.
"""

from __future__ import annotations

from typing import Any

import torch

from .operators import STAND_INS, operator


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> None:
    """Rotate pairs of columns by their angles: one of each half of a head, or neighbours."""
    wide = heads.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1) if halves else (wide[..., ::2], wide[..., 1::2])
    turned = first * cos - second * sin, second * cos + first * sin
    heads.copy_(torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2))


@operator("aiter.rope_cached_positions_2c_fwd_inplace")
def rope_cached_positions_2c_fwd_inplace(
    input_x: torch.Tensor,
    input_y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    rotate_style: int,
) -> None:
    """Rotate heads [1, T, H, rotary]; style 0 pairs halves, style 1 pairs neighbours."""
    rows = positions.flatten()
    c, s = (table[rows].float().view(1, len(rows), 1, -1) for table in (cos, sin))
    for heads in (input_x, input_y):
        _turn(heads, c, s, halves=not rotate_style)


@operator("sgl_kernel.rotary_embedding")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query,) if key is None else (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)[..., : cos_sin_cache.shape[-1]]
        _turn(heads, cos, sin, halves=is_neox)


class Rope(torch.nn.Module):
    """The object that `aiter.rotary_embedding.get_rope` returns. SGLang's own module computes the angles."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        from sglang.srt.layers.rotary_embedding.factory import get_rope  # start-up: SGLang imports this module

        angles = get_rope(*given)
        self.head_size, self.rotary_dim = angles.head_size, angles.rotary_dim
        self.is_neox_style = angles.is_neox_style
        table = angles.cos_sin_cache.to(given[6] or torch.get_default_dtype())
        cos, sin = (half.contiguous().view(len(table), 1, 1, -1) for half in table.chunk(2, dim=-1))
        self.register_buffer("cos_cache", cos, persistent=False)
        self.register_buffer("sin_cache", sin, persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = positions.numel()
        heads = (part.view(1, tokens, -1, self.head_size)[..., : self.rotary_dim] for part in (query, key))
        style = 0 if self.is_neox_style else 1
        operator_of_aiter = STAND_INS["aiter.rope_cached_positions_2c_fwd_inplace"]
        operator_of_aiter(*heads, self.cos_cache, self.sin_cache, positions.view(1, tokens), style, True, False)
        return query, key


STAND_INS["aiter.rotary_embedding.get_rope"] = Rope
