"""Layers, routings and rows that the kernels' tests share."""

from __future__ import annotations

import torch
from support.packing import pack_reorder

from kimi_w4a8_eagle3.moe.contract import MoeShape, QuarkMoeWeights
from kimi_w4a8_eagle3.moe.flydsl import layout as layout

EXPERTS, TOP_K = 5, 2
ROUTINGS = ("ragged", "one expert", "one token", "absent slots")


def route_ids(kind: str, seed: int = 0) -> torch.Tensor:
    """topk_ids int32 [T, TOP_K]; expert 4 never gets a row."""
    g = torch.Generator().manual_seed(seed)
    if kind == "one token":
        return torch.tensor([[3, 1]], dtype=torch.int32)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=g)[:TOP_K] for _ in range(21)]).int()
    if kind == "one expert":  # one row more than a prefill's short block
        ids = torch.tensor([[2, -1]] * 33, dtype=torch.int32)
    if kind == "absent slots":
        ids[4:9, 1] = -1
        ids[3] = -1
    return ids


class Layer:
    """Random weights of one layer, in Quark's words, prepared, and plain."""

    def __init__(self, hidden: int, inter: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden, self.inter = hidden, inter
        self.w13 = torch.randint(-8, 8, (EXPERTS, 2 * inter, hidden), generator=g).to(torch.int8)
        self.w2 = torch.randint(-8, 8, (EXPERTS, hidden, inter), generator=g).to(torch.int8)
        s13 = torch.rand(EXPERTS, 2 * inter, generator=g) * 4e-3 + 1e-4
        s2 = torch.rand(EXPERTS, hidden, generator=g) * 4e-3 + 1e-4
        shape = MoeShape(EXPERTS, hidden, inter, TOP_K)
        self.moe = layout.prepare(QuarkMoeWeights(shape, pack_reorder(self.w13), pack_reorder(self.w2), s13, s2))

    def rows(self, count: int, columns: int, seed: int = 1) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        return torch.randint(-127, 128, (count, columns), generator=g).to(torch.int8)


def exact_sums(weights: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, per_slot: bool) -> torch.Tensor:
    """int32 [slots, N] in 64-bit arithmetic; zeros for slots that are not routed."""
    sums = []
    for slot, expert in enumerate(ids.flatten().tolist()):
        row = rows[slot if per_slot else slot // TOP_K].long()
        sums.append(weights[expert].long() @ row if expert >= 0 else torch.zeros(weights.shape[1], dtype=torch.long))
    return torch.stack(sums).int()


def special_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(9, columns, generator=g) * torch.tensor([1, 1e-3, 30, 1e-12, 1e30, 1, 1, 1, 1])[:, None]
    x[5] = 0
    x[6] = torch.arange(columns) % 255 - 127  # every integer once: ties and exact quotients
    x[7] = (torch.arange(columns) % 509 - 254) / 2.0
    return x.to(dtype)


ROUTED = ((0, 4), (0, 0), (1, 4))  # token and expert of slots 2, 7 and 8
