"""Expected number of experts and of row blocks under uniform routing."""

from __future__ import annotations

from kimi_w4a8_eagle3.moe.contract import MoeShape


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
