"""The CPU's two attention operators with the arguments that the built-in model never sets.

Without the check of the contract: the operators take bfloat16, and float32 shows their arithmetic.
"""

from __future__ import annotations

from inspect import unwrap

import torch

from kimi_w4a8_laptop.cpu import attention

T = torch.Tensor


def decode(q: T, k: T, v: T, table: T, pool: T, lengths: T, new: tuple[T, T, T] | None = None, scale: float = 0.3) -> T:
    """Attend from one query of each request. new: its key, its value, and their places in the cache."""
    out, nothing = torch.empty(*q.shape[:2], v.shape[-1]), torch.empty(0)
    key, value, place = new or (None, None, nothing)
    unwrap(attention.decode_attention_cpu)(
        q, k, v, 1.0, 1.0, out, key, value, place, nothing, table, pool, lengths, scale, 0.0, False, 0, None, None
    )
    return out


def extend(
    q: T, k_new: T | None, v_new: T | None, k: T, v: T, table: T, pool: T, ends: T, new: T, out: T, scale: float = 0.3
) -> None:
    """Attend from the last `new` tokens of each request, packed."""
    unwrap(attention.extend_attention_cpu)(
        q, k_new, v_new, out, k, v, 1.0, 1.0, table, pool, ends, new, new.cumsum(0) - new, int(new.max()), scale,
        0.0, False, 0, None, None, None, True,
    )  # fmt: skip
