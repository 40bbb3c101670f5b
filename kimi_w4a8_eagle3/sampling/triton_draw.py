"""The draw of `draw.py` as one Triton kernel, a program per row: no sort, no copy of the probabilities.

A program reads its row once for the largest probability, about nine times for the filters' threshold where a filter is
set, and once for the race. Rows of Kimi's vocabulary (640 KB) stay in the GPU's last-level cache between the passes.
docs/perf/kernels.md has the operation counts.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, RACE_BLOCK = 16_384, 2048  # elements of a row, and counters of four elements, that are loaded at once
WARPS = 16
INFINITE = tl.constexpr(0x7F800000)  # bits of a float32
RARE = tl.constexpr(0x35800000)  # 2^-20: few filters keep tokens as rare as this, so the search begins here


@triton.jit
def _exponential(word):
    """-log(1 - w) for w = (word + 0.5) / 2^32; the quotient corrects the rounding of 1 - w (Kahan's log1p)."""
    w = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - w
    return tl.where(rest == 1.0, w, tl.where(rest > 0.0, -tl.log(rest) * w / (1.0 - rest), float("inf")))


@triton.jit
def _around(row, size, threshold, BLOCK: tl.constexpr):
    """Return the count and the sum of the row above the threshold, and the bits of its two neighbours in the row."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.int32)
    above = tl.full((BLOCK,), INFINITE, tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < size, other=0.0)
        bits, exceeds = p.to(tl.int32, bitcast=True), p > threshold
        count += exceeds.to(tl.int32)
        mass += tl.where(exceeds, p, 0.0)
        below = tl.maximum(below, tl.where(exceeds, 0, bits))
        above = tl.minimum(above, tl.where(exceeds, bits, INFINITE))
    return tl.sum(count), tl.sum(mass), tl.max(below), tl.min(above)


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
        # The threshold is 0 or a probability of the row, and positive floats are ordered as their bits.
        bits = peak.to(tl.int32, bitcast=True)
        low = tl.where(k == 1, bits, 0)
        high = tl.where((k < size) | (limit < float("inf")), bits, 0)
        while low < high:
            middle = low + (high - low) // 2
            middle = tl.where((low < RARE) & (high > RARE), RARE, middle)
            count, mass, below, above = _around(row, size, middle.to(tl.float32, bitcast=True), BLOCK)
            keeps = (count < k) & (mass <= limit)
            # Within `middle` also where NaN has no place in the order, so that the search always ends.
            high = tl.where(keeps, tl.minimum(below, middle), high)
            low = tl.where(keeps, low, tl.maximum(above, middle + 1))
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
