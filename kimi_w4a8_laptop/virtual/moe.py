"""The W4A8 MoE layer of the virtual node: the reference backend on the same memory, one launch as a GPU's kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from kimi_w4a8_eagle3.moe.contract import PreparedMoe
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend

from ..contract_check import ContractError
from ..contracts import within
from . import library
from .kernel_launch import host, launch

_compute = ReferenceBackend.forward


@torch.compiler.disable(reason="compiled code")
def forward(
    self: ReferenceBackend, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Run both stages; see MoeBackend.forward for shapes."""
    tensors: dict[str, Any] = {field.name: host(getattr(moe, field.name)) for field in fields(moe)}
    on_host = replace(moe, **tensors)

    def compute(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        experts = moe.shape.num_experts
        if not library.load().vg_capturing() and not within(topk_ids.clamp(min=0), experts):
            raise ContractError(f"w4a8_moe: topk_ids names expert {int(topk_ids.max())}, expected one of {experts}")
        return _compute(self, x, on_host, topk_weights, topk_ids)

    return launch("w4a8_moe", compute, x, topk_weights, topk_ids)


def install() -> None:
    ReferenceBackend.forward = forward  # type: ignore[method-assign]
