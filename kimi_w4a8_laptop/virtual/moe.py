"""The W4A8 MoE layer of the virtual node: the reference backend on the same memory, one launch as a GPU's kernels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from kimi_w4a8_eagle3.moe.contract import PreparedMoe, check_call
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend

from ..contract_check import ContractError
from ..contracts import within
from . import library
from .kernel_launch import host, launch

_compute = ReferenceBackend.forward
TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl"
_routed: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the layer that runs, where ranks hold different experts


@torch.compiler.disable(reason="it calls no operator of a device")
def note_routed(layer: Any, _: torch.Tensor, topk_output: Any, *__: object, **___: object) -> None:
    """Keep the router's experts, and where the loader of this rank put each; -1 where another rank has it."""
    if layer.moe_ep_size > 1:
        places = map(layer._map_global_expert_id_to_local_expert_id, range(layer.num_experts))
        _routed[:] = [(topk_output.topk_ids, torch.tensor(list(places)))]


@torch.compiler.disable(reason="compiled code")
def forward(
    self: ReferenceBackend, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Run both stages; see MoeBackend.forward for shapes."""
    check_call(x, moe, moe.layout, topk_weights, topk_ids)  # as the GPU's backends do
    tensors: dict[str, Any] = {field.name: host(getattr(moe, field.name)) for field in fields(moe)}
    on_host = replace(moe, **tensors)
    chosen, places = _routed.pop() if _routed else (topk_ids, None)

    def compute(
        x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if not library.load().vg_capturing():
            experts = moe.shape.num_experts
            if not within(topk_ids.clamp(min=0), experts):
                raise ContractError(f"w4a8_moe: topk_ids names expert {int(topk_ids.max())}, expected one of {experts}")
            if places is not None:
                _require_places(topk_ids, chosen, places)
        return _compute(self, x, on_host, topk_weights, topk_ids)

    return launch("w4a8_moe", compute, x, topk_weights, topk_ids, chosen)


def _require_places(topk_ids: torch.Tensor, chosen: torch.Tensor, places: torch.Tensor) -> None:
    wrong = (chosen >= 0) & (places[chosen.long()] != topk_ids)  # a row of padding has -1
    if bool(wrong.any()):
        expert = int(chosen[wrong][0])
        raise ContractError(
            f"w4a8_moe: topk_ids names {int(topk_ids[wrong][0])} for the router's expert {expert}, "
            f"expected {int(places[expert])}, where the loader put it"
        )


def install() -> None:
    ReferenceBackend.forward = forward  # type: ignore[method-assign]
