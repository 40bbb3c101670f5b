"""SGLang's KV cache in host memory (HiCache) on a CPU: plain memory, and copies in torch.

SGLang copies with functions of `sgl_kernel` and registers the host's memory with a GPU. Its trees, pools, queues and
events run as they are. Only the layout `layer_first` with direct copies is provided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..contract_check import takes

TARGET = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache"


@takes("sgl_kernel.transfer_kv_direct")
def copy(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between the buffers of host and device, which hold them by layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:
    """Allocate memory that no GPU reads."""
    return torch.empty(dims, dtype=dtype, device=device)


def init_hicache(original: Callable[..., None], *args: Any, **named: Any) -> None:
    """Put the copies in the place of those that SGLang imports on a GPU, then build the cache."""
    from sglang.srt.mem_cache.pool_host import common, mha, mla  # SGLang's import order: after the hooks

    mha.transfer_kv_direct = mla.transfer_kv_direct = copy
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    original(*args, **named)
