"""Layers and batches of random numbers, for measurements and for comparisons with the reference."""

from __future__ import annotations

import torch

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights


def random_layer(shape: MoeShape, device: torch.device) -> QuarkMoeWeights:
    """Make weights with uniform codes, scales of a trained model's size and, in blocks, shifts of 0 to 7."""
    generator = torch.Generator(device).manual_seed(0)

    def integers(low: int, high: int, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=dtype, device=device, generator=generator)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, device=device, generator=generator) * 0.005 + 0.001

    e, h, i, block = shape.num_experts, shape.hidden, shape.inter, shape.weights.block
    rows13, rows2 = (e, 2 * i), (e, h)
    if block is None:
        w13, w2 = (
            integers(-(2**31), 2**31 - 1, *rows, k // 8, dtype=torch.int32) for rows, k in ((rows13, h), (rows2, i))
        )
        return QuarkMoeWeights(shape, w13, w2, scales(*rows13), scales(*rows2))
    w13, w2 = (integers(0, 256, *rows, k // 2, dtype=torch.uint8) for rows, k in ((rows13, h), (rows2, i)))
    s13, s2 = (scales(*rows).log2().round().exp2() / 2**7 for rows in (rows13, rows2))
    shift13, shift2 = (integers(0, 8, *rows, k // block, dtype=torch.uint8) for rows, k in ((rows13, h), (rows2, i)))
    return QuarkMoeWeights(shape, w13, w2, s13, s2, shift13, shift2)


def random_batch(shape: MoeShape, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make (x, router weights, expert ids); each token takes top_k distinct experts, all equally likely."""
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, device=device, generator=generator).bfloat16()
    logits = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
    weights, ids = logits.topk(shape.top_k, dim=1)
    return x, weights / weights.sum(1, keepdim=True), ids.int()
