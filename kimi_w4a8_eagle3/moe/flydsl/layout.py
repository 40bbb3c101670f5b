"""The packed INT4 layout that the FlyDSL kernels read, and its conversion from Quark's words.

One expert projection [N, K] becomes tiles of 16 channels x 128 k, 1 KiB each, ordered [N/16, K/128]. Within a tile lane
`l = 16*g + n` of a wave owns 16 consecutive bytes, so one 16-byte load per lane brings the operands of four
`v_mfma_i32_16x16x32_i8`. The bytes are two groups j = 0, 1 of eight; byte i of group j holds

    high nibble: w[n, 64*j + 16*g + i]          two's complement      -> `w & 0xF0F0F0F0` is 16 * weight
    low nibble:  w[n, 64*j + 16*g + 8 + i] + 8  offset binary, 0..15  -> `w & 0x0F0F0F0F` is weight + 8

Both masks give signed bytes that the matrix unit takes as they are: two vector operations unpack eight weights. The two
kinds of product go to two accumulators, and `sum = high / 16 + low - 8 * low_sum`. `low_sum` is the sum of the row's
INT8 values at the k with bit 3 set; the kernel that quantizes a row writes it beside the scale.

The down projection's channels are paired: of 32 channels `8*g + 4*half + r` is number `4*g + r` of tile `half`. A lane
group g of the matrix unit's result then has eight neighbouring channels, which one 16-byte store writes. Its scales are
relative to the largest of their expert, which follows them: see `slot_scales`.
"""

from __future__ import annotations

import torch

from ..contract import INT8_MAX, PreparedMoe, QuarkMoeWeights

LAYOUT = "flydsl-int4-16x128"
TILE_N = 16
CHUNK_K = 128
TILE_BYTES = TILE_N * CHUNK_K // 2
PAIR = 2  # tiles whose channels are interleaved in the down projection
SCALES_PAD = 4  # floats behind the scales of an expert: their unit, then zeros
LOW_K_BIT = 8  # weights with k & LOW_K_BIT set sit in low nibbles

_SIGN_BITS = 0x88888888 - (1 << 32)  # flips two's complement nibbles to offset binary
_LOW_NIBBLES = 0x0F0F0F0F
# Quark's `reorder` keeps k % 8 = 0, 4, 1, 5 in the low and 2, 6, 3, 7 in the high nibbles of bytes 0..3. This is the
# place of each k once the bytes of the low nibbles are followed by those of the high nibbles.
_BYTE_OF_K = (0, 2, 4, 6, 1, 3, 5, 7)
_SLICE_WORDS = 1 << 23
_FLOAT16_MAX = 65504


def pack(words: torch.Tensor, paired: bool = False) -> torch.Tensor:
    """Convert Quark words int32 [E, N, K/8] to uint8 [E, N/16, K/128, 64, 16].

    16 (paired: 32) must divide N and 128 must divide K. The layer is converted in slices, so temporaries stay small.
    """
    experts, channels, k_words = words.shape
    shape = (experts, channels // TILE_N, k_words * 8 // CHUNK_K, 64, 16)
    packed = torch.empty(shape, dtype=torch.uint8, device=words.device)
    step = max(1, _SLICE_WORDS // max(1, channels * k_words))
    for start in range(0, experts, step):
        part = words[start : start + step]
        if paired:
            part = part.view(-1, channels // 32, 4, PAIR, 4, k_words).transpose(2, 3).reshape(-1, channels, k_words)
        packed[start : start + step] = _pack_slice(part)
    return packed


def _pack_slice(words: torch.Tensor) -> torch.Tensor:
    """Apply `pack` to whole words: bit operations merge a word of high nibbles with the word of the next eight k."""
    experts, channels, _ = words.shape
    tiles = words.view(experts, channels // TILE_N, TILE_N, -1, 2, 4, 2)  # ..., chunk, j, g, low
    high, low = tiles[..., 0], tiles[..., 1] ^ _SIGN_BITS
    even = ((high & _LOW_NIBBLES) << 4) | (low & _LOW_NIBBLES)
    odd = (high & ~_LOW_NIBBLES) | ((low >> 4) & _LOW_NIBBLES)
    merged = torch.stack([even, odd], dim=-1).view(torch.uint8)[..., _BYTE_OF_K]
    # [E, tile, n, chunk, j, g, 8] -> [E, tile, chunk, g, n, j, 8]
    return merged.permute(0, 1, 3, 5, 2, 4, 6).reshape(experts, channels // TILE_N, -1, 64, 16)


def prepare(weights: QuarkMoeWeights) -> PreparedMoe:
    """Repack one layer for the kernels; s2 becomes float32 [E, H + SCALES_PAD] (`slot_scales`)."""
    return PreparedMoe(
        shape=weights.shape,
        layout=LAYOUT,
        w13=pack(weights.w13),
        w2=pack(weights.w2, paired=True),
        s13=weights.s13.float().contiguous(),
        s2=slot_scales(weights.s2.float(), weights.shape.inter),
    )


def slot_scales(s2: torch.Tensor, inter: int) -> torch.Tensor:
    """Convert float32 [E, H] to [E, H + SCALES_PAD]: each scale divided by its expert's `unit`, then the unit.

    The unit makes |sum * scale| fit float16, as |sum| <= 127 * 8 * inter.
    """
    largest = s2.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    power = (-(-INT8_MAX * 8 * inter // _FLOAT16_MAX) - 1).bit_length()
    unit = largest * 2.0**power
    return torch.cat([s2 / unit, unit, unit.new_zeros(len(unit), SCALES_PAD - 1)], dim=1)
