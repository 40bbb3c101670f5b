"""`penalties.penalize` as one Triton kernel in place: no temporary tensors, one read and one write of each logit."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


@triton.jit
def penalize_kernel(
    logits, rows, counts, count_rows, weights, drafts, size, stride, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Penalize a block of the logits [B * N, size] of one position of one request; `stride` from row to row."""
    request, position = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = logits + (tl.load(rows + request) * N + position) * stride
    count = tl.load(counts + tl.load(count_rows + request) * size + at, mask=inside, other=0)
    for i in tl.static_range(1, N):
        drafted = (at == tl.load(drafts + request * N + i)) & (i <= position)
        count += drafted.to(tl.int32)
    seen = count > 0
    frequency, presence = tl.load(weights + request * 3), tl.load(weights + request * 3 + 1)
    scale = tl.where(seen, tl.load(weights + request * 3 + 2), 1.0)
    value = tl.load(row + at, mask=inside, other=0.0)
    value -= frequency * count.to(tl.float32) + tl.where(seen, presence, 0.0)
    tl.store(row + at, tl.where(value < 0.0, value * scale, tl.div_rn(value, scale)), mask=inside)


def launch(
    logits: torch.Tensor,
    n: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    weights: torch.Tensor,
    drafts: torch.Tensor | None,
) -> None:
    """Change `logits` in place; see `penalties.penalize` for the arguments."""
    size = logits.shape[1]
    penalize_kernel[(len(rows), n, triton.cdiv(size, BLOCK))](
        logits, rows, counts, count_rows, weights, rows if drafts is None else drafts.contiguous(), size,
        logits.stride(0), N=n, BLOCK=BLOCK, num_warps=WARPS,
        enable_fp_fusion=False,  # a fused sum could round differently in a verify step than in plain decoding
    )  # fmt: skip
