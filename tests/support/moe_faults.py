"""Faults of a MoE kernel, planted in what the reference backend is given: name to (forward, x, moe, router, ids)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kimi_w4a8_eagle3.moe import reference

Fault = Callable[..., torch.Tensor]


def last_tile_of_k(forward: Fault, x: Any, moe: Any, router: Any, ids: Any) -> torch.Tensor:
    w13 = moe.w13.clone()
    w13[..., -16:] = 0
    return forward(x, replace(moe, w13=w13), router, ids)


def gate_and_up_exchanged(forward: Fault, x: Any, moe: Any, router: Any, ids: Any) -> torch.Tensor:
    half = moe.shape.inter
    return forward(x, replace(moe, w13=moe.w13.roll(half, 1), s13=moe.s13.roll(half, 1)), router, ids)


def another_experts_scale(forward: Fault, x: Any, moe: Any, router: Any, ids: Any) -> torch.Tensor:
    return forward(x, replace(moe, s2=moe.s2.roll(1, 0)), router, ids)


def a_neighbours_row_scale(forward: Fault, x: Any, moe: Any, router: Any, ids: Any) -> torch.Tensor:
    right = reference.quantize_rows

    def shifted(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = right(rows)
        return values, scale.roll(1, 0)

    reference.quantize_rows = shifted
    try:
        return forward(x, moe, router, ids)
    finally:
        reference.quantize_rows = right


def a_scale_one_percent_off(forward: Fault, x: Any, moe: Any, router: Any, ids: Any) -> torch.Tensor:
    s2 = moe.s2.clone()
    s2[0] *= 1.01
    return forward(x, replace(moe, s2=s2), router, ids)


FAULTS: dict[str, Fault] = {
    "last tile of K dropped": last_tile_of_k,
    "gate and up exchanged": gate_and_up_exchanged,
    "scale of another expert": another_experts_scale,
    "row scale of a neighbour": a_neighbours_row_scale,
    "an expert's scale off by 1 %": a_scale_one_percent_off,
}
