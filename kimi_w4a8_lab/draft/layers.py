"""Layers of the DeepSeek kind in plain torch: norm, gated MLP, and latent attention with expanded keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention. rope_scaling: config.json's entry of kind yarn."""

    hidden: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class GatedMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention, over `inputs` vectors of the hidden size."""

    def __init__(self, sizes: LatentSizes, inputs: int = 1) -> None:
        super().__init__()
        c = self.c = sizes
        self.q_a_proj = nn.Linear(inputs * c.hidden, c.q_lora, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora, c.eps)
        self.q_b_proj = nn.Linear(c.q_lora, c.heads * (c.nope + c.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs * c.hidden, c.kv_lora + c.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora, c.eps)
        self.kv_b_proj = nn.Linear(c.kv_lora, c.heads * (c.nope + c.v), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v, c.hidden, bias=False)
        mscale = 0.1 * c.rope_scaling["mscale_all_dim"] * math.log(c.rope_scaling["factor"]) + 1.0
        self.scale = (c.nope + c.rope) ** -0.5 * mscale**2

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, inputs * hidden] -> three times [B, heads, T, nope + rope]; values end in zeros."""
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope, c.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora, c.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([c.nope, c.v], -1)
        k_rope = rotate_pairs(k_rope.unsqueeze(1), *rope).expand(-1, c.heads, -1, -1)
        q, k = torch.cat([q_nope, rotate_pairs(q_rope, *rope)], -1), torch.cat([k_nope, k_rope], -1)
        return q, k, F.pad(v, (0, c.nope + c.rope - c.v))  # equal head sizes let torch take its fused CPU attention

    def merged(self, out: Tensor) -> Tensor:
        """[B, heads, T, nope + rope] -> [B, T, hidden]."""
        return self.o_proj(out[..., : self.c.v].transpose(1, 2).flatten(2))


def yarn_frequencies(sizes: LatentSizes) -> Tensor:
    """Rotary frequencies [rope / 2]: interpolated by `factor` for slow dimensions, untouched for fast ones."""
    scaling, dim = sizes.rope_scaling, sizes.rope
    inverse = sizes.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def dimension_of(rotations: float) -> float:
        period = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(period) / (2 * math.log(sizes.rope_theta))

    low = max(math.floor(dimension_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension_of(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / scaling["factor"] * ramp + inverse * (1 - ramp)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring dimensions (0,1), (2,3), ... of [B, heads, T, rope] by cos, sin [B, 1, T, rope / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding of [B, heads, T, d] at positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def initialise(model: nn.Module, seed: int) -> None:
    """Draw all matrices anew: normal with std 1/sqrt(fan_in) (0.5 for the embedding), norms stay 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                std = 0.5 if name.startswith("embed_tokens") else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
