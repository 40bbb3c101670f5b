"""4-bit codes of expert weights: unpack, pack, fold their scales.

INT4 is in AMD Quark's format. Eight two's complement nibbles share an int32. With nibble 0 the lowest four bits,
`pack_method: reorder` keeps element k of every group of eight in nibble (0, 4, 1, 5, 2, 6, 3, 7)[k]. Two delta swaps
turn that order into the natural one (nibble k = element k), so no table and no loop over elements or experts is needed.

Of MXFP4 the E8M0 exponents of a row become one row scale and small left shifts. With exponent e, a weight is
`value * 2**(e - 127)`. Twice the value is an integer, so the weight is
`integer * 2**shift[block] * 2**(base - 128)` with `shift = e - base`. `base` is the row's least exponent, unless that
lies more than MAX_SHIFT below its largest, or the row's sums would not fit int32. Blocks further below are re-coded:
their integers are divided by the power of two that is missing and rounded half to even, which gives E2M1 codes again.
The error of such a weight is at most half of the row's smallest step, 2**(base - 129).
"""

from __future__ import annotations

import torch

from ..base.errors import KimiError
from .weight_format import MXFP4, NIBBLES_PER_WORD

# (distance in bits, mask of the lower partner): swap bytes 1 and 2, then nibbles 1 and 2 of each half word.
_DELTA_SWAPS = ((8, 0x0000FF00), (4, 0x00F000F0))
_SIGN_BITS = 0x88888888 - (1 << 32)  # bit 3 of every nibble: two's complement <-> offset by 8
# Words converted at once: on a CPU the temporaries stay in the cache, on a GPU they stay below 0.5 GiB.
_CHUNK_WORDS = {"cpu": 1 << 16}
_GPU_CHUNK_WORDS = 1 << 24


def unpack_reorder(words: torch.Tensor) -> torch.Tensor:
    """Unpack the INT4 values of packed words.

    words: int32 [..., K/8]. Returns int8 [..., K], values in [-8, 7].
    """
    if words.dtype != torch.int32:
        raise KimiError(f"packed INT4 words have dtype {words.dtype}", expected=str(torch.int32))
    flat = words.contiguous().view(-1)
    values = torch.empty(flat.numel(), 4, dtype=torch.int16, device=words.device)  # two values an element
    for part in _chunks(flat.numel(), words.device):
        natural = _natural_order(flat[part] ^ _SIGN_BITS)
        pairs = values[part]
        pairs.copy_(natural.view(torch.uint8).view(-1, 4))
        pairs |= pairs << 4
        pairs &= 0x0F0F
        pairs.view(torch.int8).sub_(8)
    return values.view(torch.int8).view(*words.shape[:-1], words.shape[-1] * NIBBLES_PER_WORD)


def pack_reorder(values: torch.Tensor) -> torch.Tensor:
    """Pack int8 [..., K] in [-8, 7] to int32 [..., K/8], the inverse of `unpack_reorder`."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int32, device=values.device)
    for element, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
        words |= (values[..., element::8].int() & 15) << (4 * nibble)
    return words


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


def _natural_order(words: torch.Tensor) -> torch.Tensor:
    """Swap the masked bits of each int32 word with the bits `distance` above them, in place."""
    for distance, mask in _DELTA_SWAPS:
        moved = words >> distance
        moved ^= words
        moved &= mask
        words ^= moved
        moved <<= distance
        words ^= moved
    return words


def _chunks(words: int, device: torch.device) -> list[slice]:
    step = _CHUNK_WORDS.get(device.type, _GPU_CHUNK_WORDS)
    return [slice(start, start + step) for start in range(0, words, step)]


NAN_EXPONENT = 255
MAX_SHIFT = 11  # of the kernels' layout
MOST_STEPS = (2**31 - 1) // (127 * 12 * 32)  # sum of 2**shift over the blocks of a row whose sums fit int32
_LEAST_BASE = 2  # of a row scale that is a normal float32
_EMPTY = -1000  # exponent of a block of zeros, below all others
_CHUNK_BYTES = 1 << 26  # codes converted at once, which bounds the temporaries


def unpack_codes(codes: torch.Tensor, integers: tuple[int, ...] = MXFP4.integers) -> torch.Tensor:
    """Return the integers int8 [..., K] of codes uint8 [..., K/2], whose low nibbles hold the even elements."""
    table = torch.tensor(integers, dtype=torch.int8, device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1)
    return table[pairs.int()].view(*codes.shape[:-1], codes.shape[-1] * 2)


def pack_codes(integers: torch.Tensor) -> torch.Tensor:
    """Return the codes uint8 [..., K/2] of E2M1's doubled values int8 [..., K], the inverse of `unpack_codes`."""
    steps = torch.tensor(MXFP4.integers[:8], dtype=torch.int8, device=integers.device)
    code = torch.searchsorted(steps, integers.abs()).to(torch.uint8) | (integers < 0).to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


def dequantized(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of codes [N, K/2] with exponents [N, K/32] as bfloat16 [N, K]; it has bits to spare."""
    values = unpack_codes(codes).view(*exponents.shape, -1)
    return torch.ldexp(values.double(), exponents[..., None].int() - 128).flatten(1).bfloat16()


def fold_exponents(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (shifts uint8 [E, N, K/32], row scales float32 [E, N], blocks that were re-coded).

    codes: uint8 [E, N, K/2], changed in place where a block is re-coded. exponents: uint8 [E, N, K/32] without 255. A
    block of zeros has shift 0 whatever its exponent is, and a row of zeros has scale 0.
    """
    shifts = torch.empty_like(exponents)
    scales = torch.empty(exponents.shape[:2], device=codes.device)
    step, recoded = max(1, _CHUNK_BYTES // max(1, codes[0].numel())), 0
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        blocks = codes[part].view(*exponents[part].shape, -1)
        exponent = torch.where((blocks & 0x77).amax(-1) == 0, _EMPTY, exponents[part].int())
        least = exponent.masked_fill(exponent == _EMPTY, NAN_EXPONENT).amin(-1)
        highest = exponent.amax(-1)
        base = torch.maximum(least, highest - MAX_SHIFT).clamp(min=_LEAST_BASE)
        while bool((over := _steps(exponent, base) > MOST_STEPS).any()):
            base += over
        shift = exponent - base[..., None]
        far = (shift < 0) & (exponent != _EMPTY)
        if bool(far.any()):
            missing = -shift[far][:, None].clamp(min=-8)  # 12 / 2**8 is zero
            integers = torch.round(unpack_codes(blocks[far]).float() / missing.float().exp2())
            blocks[far] = pack_codes(integers.to(torch.int8))
            recoded += int(far.sum())
        shifts[part] = shift.clamp(min=0).to(torch.uint8)
        normal = (base - 1 << 23).view(torch.float32)  # the float32 with this biased exponent, 2**(base - 128)
        scales[part] = torch.where(highest == _EMPTY, 0.0, normal)
    return shifts, scales, recoded


def _steps(exponent: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the sum of 2**shift over each row's blocks that are not empty."""
    return ((exponent - base[..., None]).clamp(min=0).float().exp2() * (exponent != _EMPTY)).sum(-1)
