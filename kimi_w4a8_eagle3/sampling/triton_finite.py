"""`finite.make_finite` as one Triton kernel: each logit is read once, and written only where it is not finite."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 8


@triton.jit(do_not_specialize=["call"])
def finite_kernel(logits, last, found, size, stride, call, BLOCK: tl.constexpr):
    """Mend a block of a row of logits [R, size]; `stride` from row to row.

    last: int32 [R], the latest call in which the row held a NaN, so that its blocks count it once. found: int64 [1].
    """
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * stride + at
    value = tl.load(place, mask=at < size, other=0.0).to(tl.float32)
    nan = value != value
    broken = nan | (tl.abs(value) == float("inf"))
    finite = tl.where(value > 0.0, 1e30, -1e30).to(logits.dtype.element_ty)
    tl.store(place, finite, mask=(at < size) & broken)
    # Triton's `and` computes both sides.
    if tl.sum(nan.to(tl.int32)) > 0:  # noqa: SIM102
        if tl.atomic_xchg(last + row, call) != call:
            tl.atomic_add(found, tl.full((), 1, tl.int64))


def launch(logits: torch.Tensor, last: torch.Tensor, found: torch.Tensor, call: int) -> None:
    """Change `logits` in place and add to `found`; `call` is a number that no earlier call had."""
    if len(logits):
        grid = len(logits), triton.cdiv(logits.shape[1], BLOCK)
        finite_kernel[grid](logits, last, found, logits.shape[1], logits.stride(0), call, BLOCK=BLOCK, num_warps=WARPS)
