"""Cap SGLang's KV pool at what AITER's paged kernels can index, whatever memory fraction was set.

SGLang sizes one pool in the target's worker and gives the same token count to the draft's worker. The cap is therefore
applied where the target's count is computed, and takes the draft's shape into account. Pools of other attention
backends are not capped, unless KIMI_PAGE_GUARD=force.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import attention_backends, get_parallel, get_spec

from ...gates import Gates, read_gates
from ...machine.aiter_regime import installed_regime
from ...machine.page_guard import KvShape, cap_tokens, kv_shape, paged_kernels, token_limit
from ...moe.contract import gpu_arch
from ..hooks import Feature

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)
FEATURE = Feature("the page guard", remove_when="no paged kernel of AITER has 32-bit offsets")
_limits: list[int] = []  # of the pools sized in this process


def known_limit() -> int | None:
    """Return the smallest pool limit that the guard applied in this process, or None if it applied none."""
    return min(_limits, default=None)


@FEATURE.around("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._apply_token_constraints")
def cap_pool(original: Callable[..., int], owner: KVCacheConfigurator, token_capacity: int) -> int:
    """Return the pool's size that SGLang makes of the profiled count, or less when a page offset would exceed int32."""
    tokens = original(owner, token_capacity)
    gates = read_gates(os.environ)
    if not _applies(gates):
        return tokens
    arch = gpu_arch(torch.device("cuda"))
    kernels = paged_kernels(_shapes(owner), installed_regime(), gates.page_guard_int_max, arch)
    page_size = int(owner.page_size or 1)
    limit, _ = token_limit(kernels, page_size)
    if limit is not None:
        _limits.append(limit)
    capped, reason = cap_tokens(tokens, kernels, page_size)
    if reason:
        logger.warning("page-offset guard: %s", reason)
    return capped


def _applies(gates: Gates) -> bool:
    if gates.page_guard != "auto":
        return gates.page_guard == "force"
    return "aiter" in (*attention_backends(), get_spec().speculative_draft_attention_backend)


def _shapes(owner: KVCacheConfigurator) -> list[KvShape]:
    """Return the KV shapes of the model that `owner` sizes a pool for and, for a target, of its draft."""
    width, tp = owner.kv_cache_dtype.itemsize, get_parallel().attn_tp_size
    shapes = [kv_shape(owner.model_config.hf_config.to_dict(), tp, width)]
    draft = _draft_config(owner)
    if draft is not None:
        tp = getattr(owner, "draft_attn_tp_size", None) or tp
        shapes.append(kv_shape(draft.hf_config.to_dict(), tp, _draft_width(width)))
    return shapes


def _draft_width(target: int) -> int:
    name = get_spec().speculative_draft_kv_cache_dtype
    return target if name is None else 1 if name.startswith("fp8") else 2


def _draft_config(owner: KVCacheConfigurator) -> ModelConfig | None:
    """Return the ModelConfig of the draft that shares the pool's token count, or None without a draft."""
    if owner.is_draft_worker or not get_spec().speculative_draft_model_path:
        return None
    return ModelConfig.from_server_args(
        owner.server_args,
        model_path=get_spec().speculative_draft_model_path,
        model_revision=get_spec().speculative_draft_model_revision,
        is_draft_model=True,
    )
