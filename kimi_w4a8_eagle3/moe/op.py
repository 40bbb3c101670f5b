"""The MoE as one custom operator, `kimi::w4a8_moe`, so that torch.compile sees a call and no kernels.

The operator takes the tensors and sizes of a PreparedMoe instead of the object, and the backend by name; a name must
have been registered with `register_backend` before the first call.
"""

from __future__ import annotations

import torch

from ..errors import KimiError
from .contract import MoeBackend, MoeShape, PreparedMoe

_backends: dict[str, MoeBackend] = {}


def register_backend(backend: MoeBackend) -> None:
    """Make `backend` the one that `kimi::w4a8_moe` runs for its name."""
    _backends[backend.name] = backend


def moe_forward(
    backend: MoeBackend, x: torch.Tensor, moe: PreparedMoe, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """`backend.forward` through the operator; see MoeBackend.forward for shapes."""
    if backend.name not in _backends:
        register_backend(backend)
    shape = moe.shape
    return w4a8_moe(
        x,
        moe.w13,
        moe.w2,
        moe.s13,
        moe.s2,
        topk_weights,
        topk_ids,
        [shape.num_experts, shape.hidden, shape.inter, shape.top_k],
        moe.layout,
        backend.name,
    )


@torch.library.custom_op("kimi::w4a8_moe", mutates_args=())
def w4a8_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    s13: torch.Tensor,
    s2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sizes: list[int],
    layout: str,
    backend: str,
) -> torch.Tensor:
    """Both MoE stages, bfloat16 [T, H] to bfloat16 [T, H].

    sizes: the fields of MoeShape in order. layout: PreparedMoe.layout. backend: a registered backend's name.
    """
    if backend not in _backends:
        raise KimiError(f"no MoE backend {backend!r} is registered", expected=", ".join(_backends) or "one registered")
    moe = PreparedMoe(shape=MoeShape(*sizes), layout=layout, w13=w13, w2=w2, s13=s13, s2=s2)
    return _backends[backend].forward(x, moe, topk_weights, topk_ids)


@w4a8_moe.register_fake
def _(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    s13: torch.Tensor,
    s2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sizes: list[int],
    layout: str,
    backend: str,
) -> torch.Tensor:
    return x.new_empty(x.shape)
