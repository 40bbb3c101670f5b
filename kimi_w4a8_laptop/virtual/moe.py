"""The W4A8 MoE layer of the virtual node: the reference backend on the same memory, one launch as a GPU's kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from kimi_w4a8_eagle3.moe.contract import PreparedMoe
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend

from .kernel_launch import host, launch

_compute = ReferenceBackend.forward


@torch.compiler.disable(reason="compiled code")
def forward(
    self: ReferenceBackend, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Run both stages; see MoeBackend.forward for shapes."""
    tensors: dict[str, Any] = {field.name: host(getattr(moe, field.name)) for field in fields(moe)}
    on_host = replace(moe, **tensors)
    return launch("w4a8_moe", lambda *given: _compute(self, given[0], on_host, *given[1:]), x, topk_weights, topk_ids)


def install() -> None:
    ReferenceBackend.forward = forward  # type: ignore[method-assign]
