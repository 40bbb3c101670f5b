"""4-bit codes of expert weights: unpack, pack, fold their scales.

INT4 is in AMD Quark's format. Eight two's complement nibbles share an int32. With nibble 0 the lowest four bits,
`pack_method: reorder` keeps element k of every group of eight in nibble (0, 4, 1, 5, 2, 6, 3, 7)[k]: nibbles of two by
four are the transposed elements of four by two.

Of MXFP4 the E8M0 exponents of a row become one row scale and small left shifts. With exponent e, a weight is
`value * 2**(e - 127)`. Twice the value is an integer, so the weight is
`integer * 2**shift[block] * 2**(base - 128)` with `shift = e - base`. `base` is the row's least exponent, unless that
lies more than MAX_SHIFT below its largest, or the row's sums would not fit int32. Blocks further below belong to a
second part of the weights, which has the same codes and a base of its own, and so on. The weights are the parts' sum.
"""

from __future__ import annotations

import torch

from ..base.errors import KimiError
from .weight_format import MXFP4


def unpack_reorder(words: torch.Tensor) -> torch.Tensor:
    """Unpack the INT4 values of packed words.

    words: int32 [..., K/8]. Returns int8 [..., K], values in [-8, 7].
    """
    if words.dtype != torch.int32:
        raise KimiError(f"packed INT4 words have dtype {words.dtype}", expected=str(torch.int32))
    return (nibbles(words) ^ 8).view(torch.int8).sub_(8)


def pack_reorder(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 [..., K] in [-8, 7] to int32 [..., K/8], the inverse of `unpack_reorder`."""
    stored = values.unflatten(-1, (-1, 4, 2)).transpose(-2, -1).flatten(-3).view(torch.uint8) & 15
    return (stored[..., ::2] | stored[..., 1::2] << 4).view(torch.int32)


def fold_scales(weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> torch.Tensor:
    """Return one float32 scale a row, `weight_scale * weight_scale_2`.

    weight_scale: one stage-1 scale per projection, e.g. [] or [1] (one projection), [E] or [E, 2] (gate and up).
    weight_scale_2: stage-2 scales of the rows, [N] or [E, N]; each stage-1 scale covers an equal run of them.
    Returns float32 of weight_scale_2's shape.
    """
    projections, rows = weight_scale.numel(), weight_scale_2.numel()
    batched = weight_scale_2.dim() > 1
    if not projections or rows % projections or (batched and weight_scale.shape[:1] != weight_scale_2.shape[:1]):
        raise KimiError(
            f"weight_scale of shape {list(weight_scale.shape)} does not fit weight_scale_2 of shape "
            f"{list(weight_scale_2.shape)}",
            expected="one weight_scale for each projection, one weight_scale_2 for each of its rows",
        )
    rows_per_projection = weight_scale_2.float().reshape(projections, -1)
    return (rows_per_projection * weight_scale.float().reshape(-1, 1)).view(weight_scale_2.shape)


NAN_EXPONENT = 255
MAX_SHIFT = 11  # of the kernels' layout
ABSENT = MAX_SHIFT + 1  # shift of a block that belongs to another part
MOST_STEPS = (2**31 - 1) // (127 * 12 * 32)  # sum of 2**shift over the blocks of a row whose sums fit int32
_LEAST_BASE = 2  # of a row scale that is a normal float32; parts after the first may have others
_NONE = -1000  # exponent of a block of zeros or of another part, below all others
_CHUNK_BYTES = 1 << 26  # codes converted at once, which bounds the temporaries


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes of `QuarkMoeWeights` one a byte, uint8 [..., K]."""
    stored = codes.contiguous().view(torch.uint8)
    pairs = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)
    return pairs if codes.dtype == torch.uint8 else pairs.unflatten(-1, (-1, 2, 4)).transpose(-2, -1).flatten(-3)


def unpack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return E2M1's doubled values int8 [..., K] of codes uint8 [..., K/2]; low nibbles hold the even elements."""
    return torch.tensor(MXFP4.integers, dtype=torch.int8, device=codes.device)[nibbles(codes).int()]


def pack_codes(integers: torch.Tensor) -> torch.Tensor:
    """Return the codes uint8 [..., K/2] of E2M1's doubled values int8 [..., K], the inverse of `unpack_codes`."""
    steps = torch.tensor(MXFP4.integers[:8], dtype=torch.int8, device=integers.device)
    code = torch.searchsorted(steps, integers.abs()).to(torch.uint8) | (integers < 0).to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


def dequantized(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of codes [N, K/2] with exponents [N, K/32] as bfloat16 [N, K]; it has bits to spare."""
    values = unpack_codes(codes).view(*exponents.shape, -1)
    return torch.ldexp(values.double(), exponents[..., None].int() - 128).flatten(1).bfloat16()


Part = tuple[torch.Tensor, torch.Tensor]  # shifts uint8 [E, N, K/32], row scales float32 [E, N]


def fold_layer(*projections: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[Part, ...]]:
    """Return the parts of a layer, each with those of all projections: (codes, exponents) as of `fold_exponents`."""
    folded = [fold_exponents(*projection) for projection in projections]
    for parts in folded:
        shifts, scales = parts[0]
        none = torch.full_like(shifts, ABSENT), torch.zeros_like(scales)
        parts += [none] * (max(map(len, folded)) - len(parts))
    return list(zip(*folded, strict=True))


def fold_exponents(codes: torch.Tensor, exponents: torch.Tensor) -> list[Part]:
    """Return the parts of the weights, most often one.

    codes: uint8 [E, N, K/2]. exponents: uint8 [E, N, K/32] without 255. A block of zeros has shift 0 in the first part,
    whatever its exponent is, and a row of zeros has scale 0.
    """
    parts, left = list[Part](), torch.empty_like(exponents, dtype=torch.bool)
    while not parts or bool(left.any()):
        shifts, scales = torch.empty_like(exponents), torch.empty(exponents.shape[:2], device=codes.device)
        for some in torch.arange(len(codes)).split(max(1, _CHUNK_BYTES // max(1, codes[0].numel()))):
            rows = slice(int(some[0]), int(some[-1]) + 1)
            if not parts:
                left[rows] = (codes[rows].view(*left[rows].shape, -1) & 0x77).amax(-1) != 0
            shifts[rows], scales[rows], left[rows] = _part(exponents[rows].int(), left[rows], first=not parts)
        parts.append((shifts, scales))
    return parts


def _part(exponents: torch.Tensor, left: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return shifts and scales of the part with the largest blocks of each row, and the mask of the blocks below."""
    exponent = torch.where(left, exponents, _NONE)
    least, highest = exponent.masked_fill(~left, NAN_EXPONENT).amin(-1), exponent.amax(-1)
    base = torch.maximum(least, highest - MAX_SHIFT).clamp(min=_LEAST_BASE if first else 0)
    while bool((over := _steps(exponent, base) > MOST_STEPS).any()):
        base += over
    shift = exponent - base[..., None]
    below = left & (shift < 0)
    shift = torch.where(left & ~below, shift, ABSENT if not first else torch.where(below, ABSENT, 0))
    bits = torch.where(base < _LEAST_BASE, 1 << base + 21, base - 1 << 23)  # of the float32 2**(base - 128)
    return shift.to(torch.uint8), torch.where(highest < base, 0.0, bits.view(torch.float32)), below


def _steps(exponent: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the sum of 2**shift over each row's blocks with exponents from `base` on."""
    return ((exponent - base[..., None]).clamp(min=0).float().exp2() * (exponent >= base[..., None])).sum(-1)
