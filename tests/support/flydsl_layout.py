"""The layout that the FlyDSL kernels read, unpacked to values in plain torch, and a row's low sum."""

from __future__ import annotations

import torch

from kimi_w4a8_eagle3.moe.flydsl.layout import CHUNK_K, LOW_K_BIT, TILE_N


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`, to plain values: uint8 [E, N/16, K/128, 64, 16] -> int8 [E, N, K]."""
    experts, tiles, chunks = packed.shape[:3]
    grouped = packed.view(experts, tiles, chunks, 4, TILE_N, 2, 8)
    high = (grouped >> 4).to(torch.int8)
    high = torch.where(high > 7, high - 16, high)
    low = (grouped & 15).to(torch.int8) - 8
    values = torch.stack([high, low], dim=-2)  # [E, tile, chunk, g, n, j, low, 8]
    return values.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(experts, tiles * TILE_N, chunks * CHUNK_K)


def low_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sum of the INT8 values whose weights sit in low nibbles: int8 [..., K] -> int32 [...]."""
    groups = rows.view(*rows.shape[:-1], -1, 2, LOW_K_BIT)
    return groups[..., 1, :].sum(dim=(-1, -2), dtype=torch.int32)
