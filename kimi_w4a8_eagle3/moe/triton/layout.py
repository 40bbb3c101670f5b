"""The Triton backend's weight layout: byte j of a row holds elements j (low nibble) and j + K/2 (high nibble).

A stage 2 row is stored as float16, so its scales are relative to the largest of their expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ..contract import INT8_MAX, PreparedMoe, QuarkMoeWeights

LAYOUT = "triton-halves"
_FLOAT16_MAX = 65504
_CHUNK_WORDS = 1 << 24  # packed words repacked at once: bounds the temporaries of `prepare` to about 0.3 GiB


def prepare(weights: QuarkMoeWeights) -> PreparedMoe:
    """Repack one layer.

    w13 int8 [E, 2I, H/2] and w2 int8 [E, H, I/2]. s13 [E, 2I]: / 16 for INT4, which the kernels use times 16. s2
    [E * H + E]: each row's scale relative to its expert's largest (and / 16 for INT4, / a power of two), then the
    largest (times that power). A row of stage 2 then fits float16 whatever the scales are. Shifts stay as they are. The
    rows of weights in several parts are float32, so their scales stay as they are, too.
    """
    stored = weights.shape.weights
    halves, unpacked = (halves_from_pairs, 1) if stored.block else (halves_from_reorder, 16)
    # A row's largest weight is its scale times the largest integer, shifted by the largest of its blocks' shifts.
    top = weights.s2 if weights.shift2 is None else weights.s2 * weights.shift2.amax(dim=2).float().exp2()
    peak = top.amax(dim=1)
    peak = torch.where(peak > 0, peak, torch.ones_like(peak))
    # |accumulator * relative scale| <= 127 * largest * I: a power of two brings that below float16's largest value.
    divisor = float(triton.next_power_of_2(-(-INT8_MAX * stored.largest * weights.shape.inter // _FLOAT16_MAX)))
    relative = weights.s2 / peak[:, None] / (unpacked * divisor)
    first = PreparedMoe(
        weights.shape,
        LAYOUT,
        halves(weights.w13),
        halves(weights.w2),
        weights.s13 / unpacked,
        torch.cat([relative.view(-1), peak * divisor]),
        weights.shift13,
        weights.shift2,
    )
    return _in_parts(first, weights, torch.ones_like(peak)) if weights.more else first


def _in_parts(first: PreparedMoe, weights: QuarkMoeWeights, units: torch.Tensor) -> PreparedMoe:
    more = _in_parts(first, weights.more, units) if weights.more else None
    s2 = torch.cat([weights.s2.view(-1), units.view(-1)])
    return replace(first, s13=weights.s13, s2=s2, shift13=weights.shift13, shift2=weights.shift2, more=more)


def halves_from_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Convert bytes of two neighbouring elements, uint8 [..., K/2] with K a multiple of 4, to int8 [..., K/2]."""
    first, second = codes.unflatten(-1, (2, -1)).unbind(-2)
    out = torch.empty(*first.shape, 2, dtype=torch.uint8, device=codes.device)
    out[..., 0] = (first & 15) | (second << 4)
    out[..., 1] = (first >> 4) | (second & 0xF0)
    return out.flatten(-2).view(torch.int8)


def halves_from_reorder(words: torch.Tensor) -> torch.Tensor:
    """Convert Quark's words to bytes that hold elements j (low nibble) and j + K/2 (high nibble).

    words: int32 [..., K/8], K a multiple of 16. Returns int8 [..., K/2].
    """
    rows, half = words.shape[:-1].numel(), words.shape[-1] // 2
    flat = words.reshape(rows, 2, half)
    out = torch.empty(rows, half, 2, dtype=torch.int32, device=words.device)
    step = max(_CHUNK_WORDS // (2 * half), 1)
    for start in range(0, rows, step):
        part = flat[start : start + step]
        for index, nibbles in enumerate(_split_natural(part)):
            low, high = nibbles[:, 0], nibbles[:, 1]
            out[start : start + step, :, index] = low | high << 4
    return out.view(torch.int8).view(*words.shape[:-1], half * 8)


def _split_natural(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements 0..3 and 4..7 of each `reorder` word, one in the low nibble of each byte.

    In byte order a word is (e0|e2, e4|e6, e1|e3, e5|e7), low nibble first.
    """
    even = words & 0x0F0F0F0F  # bytes e0 e4 e1 e5
    odd = (words >> 4) & 0x0F0F0F0F  # bytes e2 e6 e3 e7
    first = even & 0xFF | (even >> 8) & 0xFF00 | (odd & 0xFF) << 16 | (odd & 0xFF0000) << 8
    second = (even >> 8) & 0xFF | (even >> 16) & 0xFF00 | (odd & 0xFF00) << 8 | odd & -0x1000000
    return first, second
