"""Stand-ins of norms, activations, linear layers, routing, sampling and draft trees.

They compute as SGLang's CPU path does, so that answers can be compared with those of the engine on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kimi_w4a8_eagle3.quark.fp8 import quantize_rows

from ..cpu import draft_chain
from .operators import STAND_INS, operator


def _rms(x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(dtype)


@operator("aiter.rmsnorm2d_fwd")
def rmsnorm2d_fwd(input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _rms(input, weight, epsilon, input.dtype)


@operator("aiter.rmsnorm2d_fwd_with_add")
def rmsnorm2d_fwd_with_add(
    out: torch.Tensor,
    input: torch.Tensor,
    residual_in: torch.Tensor,
    residual_out: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> None:
    wide = input.float() + residual_in.float()
    residual_out.copy_(wide)
    out.copy_(_rms(wide, weight, epsilon, out.dtype))


@operator("aiter.ops.fused_qk_rmsnorm_group_quant.fused_qk_rmsnorm")
def fused_qk_rmsnorm(
    q_out_quantized: torch.Tensor,
    k_out: torch.Tensor,
    q: torch.Tensor,
    q_weight: torch.Tensor,
    q_epsilon: float,
    k: torch.Tensor,
    k_weight: torch.Tensor,
    k_epsilon: float,
) -> None:
    q_out_quantized.copy_(_rms(q, q_weight, q_epsilon, q.dtype))
    k_out.copy_(_rms(k, k_weight, k_epsilon, k.dtype))


@operator("aiter.layernorm2d_fwd")
def layernorm2d_fwd(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float = 1e-5
) -> torch.Tensor:
    return F.layer_norm(input, weight.shape, weight, bias, epsilon)


@operator("sgl_kernel.silu_and_mul")
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = input.chunk(2, dim=-1)
    result = F.silu(gate) * up
    return result if out is None else out.copy_(result)


@operator("aiter.tuned_gemm.tgemm.mm")
def mm(
    inp: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None, otype: torch.dtype | None = None
) -> torch.Tensor:
    return F.linear(inp, weights, bias).to(otype or inp.dtype)


@operator("aiter.per_token_quant_hip")
def per_token_quant_hip(x: torch.Tensor, quant_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_rows(x, quant_dtype)


@operator("aiter.gemm_a8w8_bpreshuffle")
def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor, WQ: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    n, k = WQ.shape
    weights = WQ.float().view(n // 16, k // 32, 2, 16, 16).permute(0, 3, 1, 2, 4).reshape(n, k)
    return (XQ.float() @ weights.t() * x_scale * w_scale.view(-1)).to(dtype)


@operator("aiter.ops.sample.greedy_sample")
def greedy_sample(out: torch.Tensor, input: torch.Tensor) -> None:
    out.copy_(input.argmax(-1))


@operator("aiter.biased_grouped_topk")
def biased_grouped_topk(
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    if num_expert_group != 1 or topk_group != 1:
        raise NotImplementedError("biased_grouped_topk of several groups has no stand-in")
    scores = gating_output.float().sigmoid()
    chosen = (scores + correction_bias.float()).topk(topk_ids.shape[1], dim=-1).indices
    weights = scores.gather(1, chosen)
    if need_renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_ids.copy_(chosen)
    topk_weights.copy_(weights * routed_scaling_factor)


@operator("sgl_kernel.apply_token_bitmask_inplace_cuda")
def apply_token_bitmask_inplace_cuda(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None = None
) -> None:
    rows = slice(None) if indices is None else indices.long()
    words = bitmask[rows].unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)
    allowed = (words & 1).bool().flatten(-2)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


for package in ("sgl_kernel", "sglang_jit"):  # 0.5.20, 0.5.23
    operator(f"{package}.verify_tree_greedy")(draft_chain.verify_tree_greedy_cpu)
    operator(f"{package}.build_tree_kernel_efficient")(draft_chain.build_tree_kernel_efficient_cpu)


@operator("sglang_jit.clamp_position")
def clamp_position(dst: torch.Tensor, seq_lens: torch.Tensor) -> None:
    dst.copy_((seq_lens - 1).clamp(min=0))


@operator("sglang_jit.store_cache")
def store_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    reserved_skip_index: int,
) -> None:
    kept = indices != reserved_skip_index
    k_cache[indices[kept]] = k[kept]
    v_cache[indices[kept]] = v[kept]


def fast_topk(values: torch.Tensor, topk: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values; it is torch code in sgl_kernel too, so it is no launch of its own."""
    found = torch.max(values, dim, keepdim=True) if topk == 1 else torch.topk(values, topk, dim)
    return found.values, found.indices


def shuffle_weight(x: torch.Tensor, layout: tuple[int, int]) -> torch.Tensor:
    """Return FP8 weights [N, K] in tiles of 16 rows and 32 columns; it is torch code in AITER, too."""
    if layout != (16, 16) or x.element_size() != 1:
        raise NotImplementedError(f"shuffle_weight of {x.dtype} with layout {layout} has no stand-in")
    n, k = x.shape
    return x.view(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4).reshape(n, k)


STAND_INS["sgl_kernel.fast_topk"] = fast_topk
STAND_INS["aiter.ops.shuffle.shuffle_weight"] = shuffle_weight
