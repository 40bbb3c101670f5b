"""The packed layouts that the FlyDSL kernels read, and their conversion from Quark's codes.

One expert projection [N, K] becomes tiles of 16 channels x 128 k, 1 KiB each, ordered [N/16, K/128]. Within a tile lane
`l = 16*g + n` of a wave owns 16 consecutive bytes, so one 16-byte load per lane brings the operands of four
`v_mfma_i32_16x16x32_i8`. The bytes are two groups j = 0, 1 of eight; byte i of group j holds of INT4

    high nibble: w[n, 64*j + 16*g + i]          two's complement      -> `w & 0xF0F0F0F0` is 16 * weight
    low nibble:  w[n, 64*j + 16*g + 8 + i] + 8  offset binary, 0..15  -> `w & 0x0F0F0F0F` is weight + 8

Both masks give signed bytes that the matrix unit takes as they are: two vector operations unpack eight weights. The two
kinds of product go to two accumulators, and `sum = high / 16 + low - 8 * low_sum`. `low_sum` is the sum of the row's
INT8 values at the k with bit 3 set; the kernel that quantizes a row writes it beside the scale.

MXFP4 has k = 32*g + 16*j + i and 8 more, so a lane owns one block. A nibble is a number in PAIRS, with bit 3 clear for
that value XOR 0xFC (docs/perf/kernels.md). Behind an expert's codes lies a byte for each lane and tile. Bits 6 and 7
are the shift of the products of a channel's four blocks, bits 0 to 5 what is left of the block's shift: 0 to 3, or FAR
plus 0 to 7 for 4 to 11. A tile whose shifts are all below 4 has only these.

The down projection's channels are paired: of 32 channels `8*g + 4*half + r` is number `4*g + r` of tile `half`. A lane
group g of the matrix unit's result then has eight neighbouring channels, which one 16-byte store writes. Its scales are
relative to the largest of their expert, which follows them: see `slot_scales`.
"""

from __future__ import annotations

import torch

from ...quark.packing import nibbles
from ...quark.weight_format import MXFP4, WeightFormat
from ..contract import INT8_MAX, PreparedMoe, QuarkMoeWeights

TILE_N = 16
CHUNK_K = 128
TILE_BYTES = TILE_N * CHUNK_K // 2
PAIR = 2  # tiles whose channels are interleaved in the down projection
SCALES_PAD = 4  # floats behind the scales of an expert: their unit, then zeros
LOW_K_BIT = 8  # weights with k & LOW_K_BIT set sit in low nibbles

_SLICE_WORDS = 1 << 23
_FLOAT16_MAX = 65504
PAIRS = MXFP4.integers[:8]
NEAR = 4  # a byte of shifts below it is a shift that INT8 holds, and all there is
FAR, REST = 56, 6  # bits of the byte: a shift by 56 and more clears a table; where the shift of the products begins
_E2M1_TO_PAIR = [*range(8, 16), 8, 3, 2, 1, 0, 5, 4, 6]  # -1 is 3 ^ 0xFC


def name(weights: WeightFormat) -> str:
    return f"flydsl-{weights.name.lower()}-16x128"


def packed_bytes(weights: WeightFormat, count: int) -> int:
    """Return the bytes of an expert with `count` weights."""
    return int(count * weights.bits) // 8


def pack(words: torch.Tensor, paired: bool = False, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """Convert code words int32 [E, N, K/8] to uint8 [E, N/16, K/128, 64, 16], of MXFP4 to [E, bytes].

    shifts: uint8 [E, N, K/32] of MXFP4. 16 (paired: 32) must divide N and 128 must divide K. The layer is converted in
    slices, so temporaries stay small.
    """
    experts, channels, k_words = words.shape
    shape = (experts, channels // TILE_N, k_words * 8 // CHUNK_K, 64, 16)
    codes = channels * k_words * 4
    packed = torch.empty(
        (experts, codes + (0 if shifts is None else codes // 16)), dtype=torch.uint8, device=words.device
    )
    step = max(1, _SLICE_WORDS // max(1, channels * k_words))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        stored = words[part] if shifts is None else _recoded(words[part].view(torch.uint8))
        packed[part, :codes] = _tiled(_ordered(nibbles(stored), paired), blocks=shifts is not None)
        if shifts is None:
            continue
        by_lane = _ordered(_lane_bytes(words[part], shifts[part]), paired)
        packed[part, codes:] = by_lane.view(-1, *shape[1:2], TILE_N, shape[2], 4).permute(0, 1, 3, 4, 2).flatten(1)
    return packed.view(shape) if shifts is None else packed


def _ordered(rows: torch.Tensor, paired: bool) -> torch.Tensor:
    """Return rows [E, N, k] in the order of the tiles' channels."""
    _, channels, k = rows.shape
    return rows.view(-1, channels // 32, 4, PAIR, 4, k).transpose(2, 3).reshape(-1, channels, k) if paired else rows


def _tiled(values: torch.Tensor, blocks: bool) -> torch.Tensor:
    """Merge each eight nibbles [E, N, K] with those of the next eight k, in the order of the tiles: [E, bytes]."""
    lanes = (4, 2, 2, 8) if blocks else (2, 4, 2, 8)  # g, j, low, i or j, g, low, i
    high, low = values.view(len(values), -1, TILE_N, values.shape[2] // CHUNK_K, *lanes).unbind(-2)
    merged = high << 4 | (low if blocks else low ^ 8)  # offset binary
    # [E, tile, n, chunk, g and j, 8] -> [E, tile, chunk, g, n, j, 8]
    return merged.permute((0, 1, 3, 4, 2, 5, 6) if blocks else (0, 1, 3, 5, 2, 4, 6)).flatten(1)


def _recoded(codes: torch.Tensor) -> torch.Tensor:
    """Convert bytes of two E2M1 codes to numbers in PAIRS."""
    both = [low | high << 4 for high in _E2M1_TO_PAIR for low in _E2M1_TO_PAIR]
    return torch.tensor(both, dtype=torch.uint8, device=codes.device)[codes.int()]


def _lane_bytes(words: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Return the byte of shifts of each block."""
    empty = (words.view(*shifts.shape, 4) & 0x77777777 == 0).all(-1)
    by_chunk = shifts.int().masked_fill(empty, 0).view(*shifts.shape[:-1], -1, CHUNK_K // 32)
    least = by_chunk.masked_fill(empty.view_as(by_chunk), 3).amin(-1, keepdim=True).clamp(max=3)
    rest = torch.where(by_chunk.amax(-1, keepdim=True) < NEAR, 0, least)
    own = (by_chunk - rest).masked_fill(empty.view_as(by_chunk), 0)
    return (torch.where(own < NEAR, own, FAR + own - NEAR) | rest << REST).view_as(shifts).to(torch.uint8)


def prepare(weights: QuarkMoeWeights) -> PreparedMoe:
    """Repack one layer for the kernels; s2 becomes float32 [E, H + SCALES_PAD] (`slot_scales`)."""
    w13, w2 = (codes.contiguous().view(torch.int32) for codes in (weights.w13, weights.w2))
    s2 = slot_scales(weights.s2.float(), weights.shape.inter * weights.shape.weights.largest, weights.shift2)
    w13, w2 = pack(w13, shifts=weights.shift13), pack(w2, paired=True, shifts=weights.shift2)
    return PreparedMoe(weights.shape, name(weights.shape.weights), w13, w2, weights.s13.float().contiguous(), s2)


def slot_scales(s2: torch.Tensor, largest_sum: int, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """Convert float32 [E, H] to [E, H + SCALES_PAD]: each scale divided by its expert's `unit`, then the unit.

    The unit makes |sum * scale| fit float16, as |sum| <= 127 * largest_sum, the largest sum of a row's weights without
    their shifts.
    """
    largest = (s2.abs() if shifts is None else s2 * shifts.amax(-1).float().exp2()).amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    power = (-(-INT8_MAX * largest_sum // _FLOAT16_MAX) - 1).bit_length()
    unit = largest * 2.0**power
    return torch.cat([s2 / unit, unit, unit.new_zeros(len(unit), SCALES_PAD - 1)], dim=1)
