"""MXFP4 blocks as the kernels take them: the E8M0 exponents of a row become one row scale and small left shifts.

With exponent e, a weight is `value * 2**(e - 127)`. Twice the value is an integer, so the weight is
`integer * 2**shift[block] * 2**(base - 128)` with `shift = e - base`. `base` is the row's least exponent, but no more
than MAX_SHIFT below its largest, so that sums fit int32. Blocks further below are re-coded: their integers are divided
by the power of two that is missing and rounded half to even, which gives E2M1 codes again. The error of such a weight
is at most half of the row's smallest step, 2**(base - 129).
"""

from __future__ import annotations

import torch

from .weight_format import MXFP4

NAN_EXPONENT = 255
MAX_SHIFT = 7
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
