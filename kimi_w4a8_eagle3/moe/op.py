"""One prepared layer, and `kimi::w4a8_moe`: the custom operator that torch.compile sees instead of its kernels.

An operator's schema has tensors and numbers but no objects, so the operator takes a layer by its handle. Outside of
tracing a layer skips the operator, whose dispatch takes as long as three of torch's small operators.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch

from .contract import MoeBackend, QuarkMoeWeights

_handles = count()
_layers: WeakValueDictionary[int, MoeLayer] = WeakValueDictionary()


class MoeLayer:
    """One MoE layer, prepared by the backend that was chosen for it. Calling it runs that backend on its weights."""

    def __init__(self, backend: MoeBackend, weights: QuarkMoeWeights) -> None:
        self.backend = backend
        self.prepared = backend.prepare(weights)
        self.handle = next(_handles)
        _layers[self.handle] = self

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Run both stages; see MoeBackend.forward for shapes."""
        if torch.compiler.is_compiling():
            return w4a8_moe(x, topk_weights, topk_ids, self.handle)
        return self.backend.forward(x, self.prepared, topk_weights, topk_ids)


@torch.library.custom_op("kimi::w4a8_moe", mutates_args=())
def w4a8_moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int) -> torch.Tensor:
    """Run both stages of the MoeLayer with this `handle`, bfloat16 [T, H] to bfloat16 [T, H]."""
    layer = _layers[handle]
    return layer.backend.forward(x, layer.prepared, topk_weights, topk_ids)


@w4a8_moe.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int) -> torch.Tensor:
    return x.new_empty(x.shape)
