"""The Triton backend's weight layout: byte j of a row holds elements j (low nibble) and j + K/2 (high nibble).

A stage 2 row is stored as float16, so its scales are relative to the largest of their expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ...quark.packing import nibbles
from ..contract import INT8_MAX, PreparedMoe, QuarkMoeWeights

LAYOUT = "triton-halves"
_FLOAT16_MAX = 65504
_CHUNK_BYTES = 1 << 26  # repacked at once: bounds the temporaries of `prepare` to about 0.4 GiB


def prepare(weights: QuarkMoeWeights) -> PreparedMoe:
    """Repack one layer.

    w13 int8 [E, 2I, H/2] and w2 int8 [E, H, I/2]. s13 [E, 2I]: / 16 for INT4, which the kernels use times 16. s2
    [E * H + E]: each row's scale relative to its expert's largest (and / 16 for INT4, / a power of two), then the
    largest (times that power). A row of stage 2 then fits float16 whatever the scales are. Shifts stay as they are. The
    rows of weights in several parts are float32, so their scales stay as they are, too.
    """
    stored = weights.shape.weights
    unpacked = 1 if stored.block else 16
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


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes of QuarkMoeWeights to bytes that hold elements j (low nibble) and j + K/2 (high nibble).

    K is a multiple of 16. Returns int8 [..., K/2].
    """
    rows = codes.flatten(0, -2)
    out = torch.empty(len(rows), rows.shape[1] * rows.element_size(), dtype=torch.uint8, device=codes.device)
    step = max(_CHUNK_BYTES // out.shape[1], 1)
    for some, target in zip(rows.split(step), out.split(step), strict=True):
        low, high = nibbles(some).chunk(2, dim=1)
        torch.bitwise_or(low, high << 4, out=target)
    return out.view(torch.int8).view(*codes.shape[:-1], -1)
