"""Rows of the kernels' blocks: how many there are under uniform routing, and in which multiples they are multiplied."""

from __future__ import annotations

from kimi_w4a8_eagle3.gates import PREFILL_ROWS
from kimi_w4a8_eagle3.moe.contract import MoeShape


def padded_to(tile_m: int) -> int:
    """Return the multiple in which a block's rows are multiplied; in prefill it is less than the block."""
    from kimi_w4a8_eagle3.moe.flydsl.configs import TOGETHER  # torch, slow to import

    return 16 * TOGETHER if tile_m >= PREFILL_ROWS else tile_m


def expected_blocks(shape: MoeShape, tokens: int, tile_m: int) -> tuple[float, float]:
    """Return (distinct experts, row blocks) if each token takes top_k different experts at random."""
    p = shape.top_k / shape.num_experts
    experts, blocks = 0.0, 0.0
    probability = (1 - p) ** tokens
    # Each binomial term follows from the one before. Large batches, which underflow at 0 rows, use the limit.
    if probability > 1e-250:
        for rows in range(1, tokens + 1):
            probability *= (tokens - rows + 1) / rows * p / (1 - p)
            experts += probability
            blocks += probability * -(-rows // tile_m)
    else:
        experts, blocks = 1.0, tokens * p / tile_m + 0.5
    return experts * shape.num_experts, blocks * shape.num_experts
