"""Speculative steps of a group of ranks that has fewer requests than another one (DP attention), on a CPU.

SGLang sizes the attention of draft and verify steps first, and pads the group's batch to the longest one afterwards.
The kernels of a GPU compute something for the added rows, which nobody reads. The CPU's operators refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

_BACKEND = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
DECODE, EXTEND = f"{_BACKEND}.forward_decode", f"{_BACKEND}.forward_extend"


def attend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *more: object,
    **named: object,
) -> torch.Tensor:
    """AROUND hook: compute the rows that the attention was sized for; the others are zeros."""
    requests = len(backend.forward_metadata[0])
    tokens = requests if backend.extend_metadata is None else int(backend.extend_metadata[1].sum())
    padding = len(q) - tokens
    if not padding:
        return original(backend, q, k, v, layer, forward_batch, *more, **named)
    own = copy(forward_batch)
    own.req_pool_indices, own.out_cache_loc = own.req_pool_indices[:requests], own.out_cache_loc[:tokens]
    output = original(backend, q[:tokens], k[:tokens], v[:tokens], layer, own, *more, **named)
    return torch.nn.functional.pad(output, (0, 0, 0, padding))
