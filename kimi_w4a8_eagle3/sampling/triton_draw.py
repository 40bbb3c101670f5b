"""The draw of `draw.py` as one Triton kernel, a program per row: no sort, no copy of the probabilities.

A program reads its row once for the largest probability, once for each bit of the filters' threshold where a filter is
set, and once for the race. Rows of Kimi's vocabulary (640 KB) stay in the GPU's last-level cache between the passes.
docs/perf/sampling.md has the operation counts.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, RACE_BLOCK = 16_384, 2048  # elements of a row, and counters of four elements, that are loaded at once
WARPS = 16


@triton.jit
def _exponential(word):
    """-log(1 - w) for w = (word + 0.5) / 2^32; the quotient corrects the rounding of 1 - w (Kahan's log1p)."""
    w = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - w
    return tl.where(rest == 1.0, w, tl.where(rest > 0.0, -tl.log(rest) * w / (1.0 - rest), float("inf")))


@triton.jit
def _above(row, size, threshold, BLOCK: tl.constexpr):
    """Return (the number of probabilities of the row that exceed the threshold, their sum)."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < size, other=0.0)
        count += (p > threshold).to(tl.int32)
        mass += tl.where(p > threshold, p, 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def draw_kernel(
    probs,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    size,
    stride,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    RACE_BLOCK: tl.constexpr,
):
    """Store in tokens[r] the draw from row r of probs, float32 [R, size] with `stride` elements from row to row."""
    r = tl.program_id(0)
    row = probs + r.to(tl.int64) * stride
    peak, first = tl.full((), -1.0, tl.float32), 0
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best, place = tl.max(tl.load(row + at, mask=at < size, other=-1.0), axis=0, return_indices=True)
        first = tl.where(best > peak, start + place, first)
        peak = tl.maximum(peak, best)
    k = tl.load(top_k + r)
    threshold = 0.0
    if FILTER:
        limit = tl.load(top_p + r)
        limit = tl.where(limit >= 1.0, float("inf"), limit)
        low, high = 0, peak.to(tl.int32, bitcast=True)  # positive floats are ordered as their bits
        for _ in range(31):
            middle = low + (high - low) // 2
            count, mass = _above(row, size, middle.to(tl.float32, bitcast=True), BLOCK)
            keeps = (count < k) & (mass <= limit)
            high = tl.where(keeps, middle, high)
            low = tl.where(keeps, low, tl.minimum(middle + 1, high))
        threshold = tl.maximum(high.to(tl.float32, bitcast=True), peak * tl.load(min_p + r))
    winner, least = first, float("inf")
    seed, position = tl.load(seeds + r), tl.load(positions + r).to(tl.uint32)
    quarter = tl.cdiv(size, 4)
    zero = tl.zeros((RACE_BLOCK,), tl.uint32)
    for start in range(0, quarter, RACE_BLOCK):
        counter = start + tl.arange(0, RACE_BLOCK)
        words = tl.philox(seed, counter.to(tl.uint32), zero + position, zero, zero)
        for word in tl.static_range(4):
            at = word * quarter + counter
            inside = (counter < quarter) & (at < size)
            p = tl.load(row + at, mask=inside, other=0.0)
            race = tl.where((p >= threshold) & (p > 0.0), _exponential(words[word]) / p, float("inf"))
            best, place = tl.min(race, axis=0, return_indices=True)
            token = word * quarter + start + place
            wins = (best < least) | ((best == least) & (token < winner))
            winner = tl.where(wins, token, winner)
            least = tl.where(wins, best, least)
    tl.store(tokens + r, tl.where(k == 1, first, winner))


def launch(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    filtered: bool,
) -> torch.Tensor:
    """Return the token drawn from each row, int64 [R]; see `draw.draw` for the arguments."""
    rows, size = probs.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=probs.device)
    draw_kernel[(rows,)](
        probs, top_k, top_p, min_p, seeds, positions, tokens, size, probs.stride(0),
        FILTER=filtered, BLOCK=BLOCK, RACE_BLOCK=RACE_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return tokens
