"""What vector ALU instructions compute: one row per opcode, "sources -> result" and a NumPy function.

Semantics: AMD CDNA3 ISA reference, chapter 12 (VOP1, VOP2, VOP3). Shift amounts use their low bits only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .numeric import exponent_f32, flush_f32, fma_f32, maximum, minimum, to_integer, transcendental
from .state import Array

u32, i32, u64, i64, f32 = np.uint32, np.int32, np.uint64, np.int64, np.float32


@dataclass(frozen=True)
class Op:
    """Source types, result type and the function from sources to result."""

    sources: tuple[str, ...]
    result: str
    function: Callable[..., Array]


_TYPES = {"u": "u32", "i": "i32", "f": "f32", "U": "u64", "I": "i64", "F": "f64", "h": "f16", "s": "u16", "t": "i16"}
OPS: dict[str, Op] = {}


def _op(names: str, signature: str, function: Callable[..., Array]) -> None:
    sources, _, result = signature.partition(">")
    for name in names.split():
        OPS[name] = Op(tuple(_TYPES[letter] for letter in sources), _TYPES[result], function)


def _bits(count: int) -> np.uint32:
    return u32((1 << count) - 1)


def _field_mask(width: Array) -> Array:
    return (u32(1) << (width & u32(31))) - u32(1)


# -- moves and bit operations ---------------------------------------------------------------------------------------
_op("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u>u", lambda a: a)
_op("v_mov_b64", "U>U", lambda a: a)
_op("v_not_b32", "u>u", lambda a: ~a)
_op("v_and_b32", "uu>u", lambda a, b: a & b)
_op("v_or_b32", "uu>u", lambda a, b: a | b)
_op("v_xor_b32", "uu>u", lambda a, b: a ^ b)
_op("v_xnor_b32", "uu>u", lambda a, b: ~(a ^ b))
_op("v_and_or_b32", "uuu>u", lambda a, b, c: (a & b) | c)
_op("v_or3_b32", "uuu>u", lambda a, b, c: a | b | c)
_op("v_xad_u32", "uuu>u", lambda a, b, c: (a ^ b) + c)
_op("v_bfi_b32", "uuu>u", lambda a, b, c: (a & b) | (~a & c))
_op("v_lshlrev_b32", "uu>u", lambda a, b: b << (a & u32(31)))
_op("v_lshrrev_b32", "uu>u", lambda a, b: b >> (a & u32(31)))
_op("v_ashrrev_i32", "ui>i", lambda a, b: b >> (a & u32(31)).astype(i32))
_op("v_lshlrev_b64", "uU>U", lambda a, b: b << (a & u32(63)).astype(u64))
_op("v_lshrrev_b64", "uU>U", lambda a, b: b >> (a & u32(63)).astype(u64))
_op("v_ashrrev_i64", "uI>I", lambda a, b: b >> (a & u32(63)).astype(i64))
_op("v_lshl_or_b32", "uuu>u", lambda a, b, c: (a << (b & u32(31))) | c)
_op("v_bfm_b32", "uu>u", lambda a, b: ((u32(1) << (a & u32(31))) - u32(1)) << (b & u32(31)))
_op("v_bfe_u32", "uuu>u", lambda a, b, c: (a >> (b & u32(31))) & _field_mask(c))


def _bfe_i32(a: Array, b: Array, c: Array) -> Array:
    offset, size = (b & u32(31)).astype(i64), (c & u32(31)).astype(i64)
    field = (a.astype(i64) >> offset) & ((i64(1) << size) - i64(1))
    sign = np.where(size > 0, i64(1) << np.maximum(size - 1, 0), 0)
    return ((field ^ sign) - sign).astype(i32)


_op("v_bfe_i32", "iuu>i", _bfe_i32)


def _reverse_bits(a: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0xFFFF)):
        a = ((a >> u32(shift)) & u32(mask)) | ((a & u32(mask)) << u32(shift))
    return a


_op("v_bfrev_b32", "u>u", _reverse_bits)
_op("v_bcnt_u32_b32", "uu>u", lambda a, b: np.bitwise_count(a).astype(u32) + b)


def _first_high(a: Array) -> Array:
    top = np.frexp(a.astype(np.float64))[1].astype(i32)
    return np.where(a == 0, u32(0xFFFFFFFF), (32 - top).astype(u32))


_op("v_ffbh_u32", "u>u", _first_high)
_op("v_ffbl_b32", "u>u", lambda a: np.where(a == 0, u32(0xFFFFFFFF), u32(31) - _first_high(a & (~a + u32(1)))))


def perm_b32(high: Array, low: Array, selector: Array) -> Array:
    """V_PERM_B32: each selector byte picks one of the 8 bytes {high, low}, a sign fill, 0x00 or 0xff."""
    result = np.zeros(np.broadcast_shapes(high.shape, low.shape, selector.shape), u32)
    for picks in np.unique(selector):  # nearly always one
        result = np.where(selector == picks, _bytes_picked(high, low, int(picks)), result)
    return result


def _bytes_picked(high: Array, low: Array, picks: int) -> Array:
    result, byte = np.zeros((), u32), np.zeros((), u32)
    for lane in range(4):
        pick = (picks >> 8 * lane) & 0xFF
        if pick < 8:
            byte = ((high if pick & 4 else low) >> u32(8 * (pick & 3))) & u32(0xFF)
        elif pick < 12:  # bit 15 or 31 of a word
            byte = (((high if pick & 2 else low) >> u32(31 if pick & 1 else 15)) & u32(1)) * u32(0xFF)
        else:
            byte = np.array(0xFF if pick > 12 else 0, u32)
        result = result | (byte << u32(8 * lane))
    return result


_op("v_perm_b32", "uuu>u", perm_b32)


def _align(a: Array, b: Array, shift: Array) -> Array:
    return (((a.astype(u64) << u64(32)) | b) >> shift.astype(u64)).astype(u32)


_op("v_alignbit_b32", "uuu>u", lambda a, b, c: _align(a, b, c & u32(31)))
_op("v_alignbyte_b32", "uuu>u", lambda a, b, c: _align(a, b, (c & u32(3)) * u32(8)))

# -- integer arithmetic ---------------------------------------------------------------------------------------------
_op("v_add_u32 v_add_i32", "uu>u", lambda a, b: a + b)
_op("v_sub_u32 v_sub_i32", "uu>u", lambda a, b: a - b)
_op("v_subrev_u32", "uu>u", lambda a, b: b - a)
_op("v_add3_u32", "uuu>u", lambda a, b, c: a + b + c)
_op("v_lshl_add_u32", "uuu>u", lambda a, b, c: (a << (b & u32(31))) + c)
_op("v_add_lshl_u32", "uuu>u", lambda a, b, c: (a + b) << (c & u32(31)))
_op("v_lshl_add_u64", "UuU>U", lambda a, b, c: (a << (b & u32(7)).astype(u64)) + c)
_op("v_mul_lo_u32 v_mul_lo_i32", "uu>u", lambda a, b: a * b)
_op("v_mul_hi_u32", "uu>u", lambda a, b: ((a.astype(u64) * b.astype(u64)) >> u64(32)).astype(u32))
_op("v_mul_hi_i32", "ii>i", lambda a, b: ((a.astype(i64) * b.astype(i64)) >> i64(32)).astype(i32))
_op("v_mul_u32_u24", "uu>u", lambda a, b: (a & _bits(24)) * (b & _bits(24)))
_op("v_mad_u32_u24", "uuu>u", lambda a, b, c: (a & _bits(24)) * (b & _bits(24)) + c)


def _s24(a: Array) -> Array:
    return (a.astype(i32) << i32(8)) >> i32(8)


_op("v_mul_i32_i24", "ii>i", lambda a, b: _s24(a) * _s24(b))
_op("v_mad_i32_i24", "iii>i", lambda a, b, c: _s24(a) * _s24(b) + c)
for _t in ("u", "i"):
    _op(f"v_min_{_t}32", f"{_t}{_t}>{_t}", np.minimum)
    _op(f"v_max_{_t}32", f"{_t}{_t}>{_t}", np.maximum)
    _op(f"v_min3_{_t}32", f"{_t * 3}>{_t}", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    _op(f"v_max3_{_t}32", f"{_t * 3}>{_t}", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    _op(
        f"v_med3_{_t}32",
        f"{_t * 3}>{_t}",
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    )
_op("v_add_u16", "ss>s", lambda a, b: a + b)
_op("v_sub_u16", "ss>s", lambda a, b: a - b)
_op("v_mul_lo_u16", "ss>s", lambda a, b: a * b)
_op("v_lshlrev_b16", "ss>s", lambda a, b: b << (a & np.uint16(15)))
_op("v_lshrrev_b16", "ss>s", lambda a, b: b >> (a & np.uint16(15)))
_op("v_ashrrev_i16", "st>t", lambda a, b: b >> (a & np.uint16(15)).astype(np.int16))
_op("v_max_u16", "ss>s", np.maximum)
_op("v_min_u16", "ss>s", np.minimum)
_op("v_max_i16", "tt>t", np.maximum)
_op("v_min_i16", "tt>t", np.minimum)


def _dot4_i8(a: Array, b: Array, c: Array) -> Array:
    total = c
    for shift in (24, 16, 8, 0):
        total = total + ((a << i32(shift)) >> i32(24)) * ((b << i32(shift)) >> i32(24))
    return total


_op("v_dot4_i32_i8", "iii>i", _dot4_i8)


def _sad_u8(a: Array, b: Array, c: Array) -> Array:
    for shift in (0, 8, 16, 24):
        x, y = ((n >> u32(shift)) & u32(0xFF) for n in (a, b))
        c = c + np.where(x > y, x - y, y - x)
    return c


_op("v_sad_u8", "uuu>u", _sad_u8)

# -- floating point -------------------------------------------------------------------------------------------------
_op("v_add_f32", "ff>f", lambda a, b: a + b)
_op("v_sub_f32", "ff>f", lambda a, b: a - b)
_op("v_subrev_f32", "ff>f", lambda a, b: b - a)
_op("v_mul_f32", "ff>f", lambda a, b: a * b)
_op("v_mul_legacy_f32", "ff>f", lambda a, b: np.where((a == 0) | (b == 0), f32(0), a * b))
_op("v_fma_f32", "fff>f", fma_f32)
_op("v_min_f32", "ff>f", minimum)
_op("v_max_f32", "ff>f", maximum)
_op("v_min3_f32", "fff>f", lambda a, b, c: minimum(minimum(a, b), c))
_op("v_max3_f32", "fff>f", lambda a, b, c: maximum(maximum(a, b), c))


def _median_f32(a: Array, b: Array, c: Array) -> Array:
    any_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where(any_nan, minimum(minimum(a, b), c), middle)


_op("v_med3_f32", "fff>f", _median_f32)
_op("v_floor_f32", "f>f", np.floor)
_op("v_ceil_f32", "f>f", np.ceil)
_op("v_trunc_f32", "f>f", np.trunc)
_op("v_rndne_f32", "f>f", np.rint)
_op("v_fract_f32", "f>f", lambda a: np.minimum(a - np.floor(a), f32(1 - 2.0**-24)))
_op("v_ldexp_f32", "fi>f", lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b, -400, 400)).astype(f32))
_op("v_exp_f32", "f>f", lambda a: transcendental(np.exp2, a))
_op("v_log_f32", "f>f", lambda a: transcendental(np.log2, a))
_op("v_rcp_f32 v_rcp_iflag_f32", "f>f", lambda a: transcendental(np.reciprocal, a))
_op("v_sqrt_f32", "f>f", lambda a: transcendental(np.sqrt, a))
_op("v_rsq_f32", "f>f", lambda a: flush_f32((1 / np.sqrt(flush_f32(a).astype(np.float64))).astype(f32)))
_op("v_frexp_mant_f32", "f>f", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a))
_op("v_frexp_exp_i32_f32", "f>i", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32))


def _div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    negative = np.signbit(d) ^ np.signbit(n)
    sign = np.where(negative, f32(-1), f32(1))
    # The refinement steps give NaN only where the quotient overflows.
    result = np.copysign(np.where(np.isnan(q), f32(np.inf), np.abs(q)), sign)
    # A quotient below 2**-150 rounds to zero.
    result = np.where(exponent_f32(n) - exponent_f32(d) < -150, np.copysign(f32(0), sign), result)
    result = np.where(np.isinf(d) | (n == 0), np.copysign(f32(0), sign), result)
    result = np.where((d == 0) | np.isinf(n), np.copysign(f32(np.inf), sign), result)
    bad = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n))
    result = np.where(bad, u32(0xFFC00000).view(f32), result)
    return np.where(np.isnan(n), n, np.where(np.isnan(d), d, result)).astype(f32)


_op("v_div_fixup_f32", "fff>f", _div_fixup)
_op("v_add_f64", "FF>F", lambda a, b: a + b)
_op("v_mul_f64", "FF>F", lambda a, b: a * b)
_op("v_add_f16", "hh>h", lambda a, b: a + b)
_op("v_sub_f16", "hh>h", lambda a, b: a - b)
_op("v_mul_f16", "hh>h", lambda a, b: a * b)
_op("v_max_f16", "hh>h", maximum)
_op("v_min_f16", "hh>h", minimum)

# -- conversions ----------------------------------------------------------------------------------------------------
_op("v_cvt_f32_i32", "i>f", lambda a: a.astype(f32))
_op("v_cvt_f32_u32", "u>f", lambda a: a.astype(f32))
_op("v_cvt_i32_f32", "f>i", lambda a: to_integer(a, i32))
_op("v_cvt_u32_f32", "f>u", lambda a: to_integer(a, u32))
_op("v_cvt_rpi_i32_f32", "f>i", lambda a: to_integer(np.floor(a.astype(np.float64) + 0.5), i32))
_op("v_cvt_flr_i32_f32", "f>i", lambda a: to_integer(np.floor(a), i32))
_op("v_cvt_f16_f32", "f>h", lambda a: a.astype(np.float16))
_op("v_cvt_f32_f16", "h>f", lambda a: a.astype(f32))
_op("v_cvt_f64_f32", "f>F", lambda a: a.astype(np.float64))
_op("v_cvt_f32_f64", "F>f", lambda a: a.astype(f32))
_op("v_cvt_f64_i32", "i>F", lambda a: a.astype(np.float64))
_op("v_cvt_f64_u32", "u>F", lambda a: a.astype(np.float64))
_op("v_cvt_f16_u16", "s>h", lambda a: a.astype(np.float16))
_op("v_cvt_f16_i16", "t>h", lambda a: a.astype(np.float16))
for _byte in range(4):
    _op(f"v_cvt_f32_ubyte{_byte}", "u>f", lambda a, s=8 * _byte: ((a >> u32(s)) & u32(0xFF)).astype(f32))


def _pack(low: Array, high: Array) -> Array:
    low, high = np.broadcast_arrays(low, high)
    return low.view(np.uint16).astype(u32) | (high.view(np.uint16).astype(u32) << u32(16))


def _toward_zero_f16(a: Array) -> Array:
    near = a.astype(np.float16)
    over = np.abs(near.astype(f32)) > np.abs(a)
    return np.where(over & np.isfinite(a), (near.view(np.uint16) - np.uint16(1)).view(np.float16), near)


_op("v_cvt_pkrtz_f16_f32", "ff>u", lambda a, b: _pack(_toward_zero_f16(a), _toward_zero_f16(b)))
_op("v_pack_b32_f16", "ss>u", _pack)
_op("v_cvt_pk_i16_i32", "ii>u", lambda a, b: _pack(*(np.clip(x, -32768, 32767).astype(np.int16) for x in (a, b))))
_op("v_cvt_pk_u16_u32", "uu>u", lambda a, b: _pack(*(np.minimum(x, 65535).astype(np.uint16) for x in (a, b))))

# -- the same with clamp: saturating ----------------------------------------------------------------------------------


def _saturate(operation: Callable[[Array, Array], Array], kind: type[np.integer]) -> Callable[[Array, Array], Array]:
    low, high = np.iinfo(kind).min, np.iinfo(kind).max

    def function(a: Array, b: Array) -> Array:
        wide = operation(np.asarray(a).view(kind).astype(i64), np.asarray(b).view(kind).astype(i64))
        return np.clip(wide, low, high).astype(kind).view(np.asarray(a).dtype)

    return function


SATURATED = {
    "v_add_u32": _saturate(np.add, np.uint32),
    "v_sub_u32": _saturate(np.subtract, np.uint32),
    "v_add_i32": _saturate(np.add, np.int32),
    "v_sub_i32": _saturate(np.subtract, np.int32),
    "v_add_u16": _saturate(np.add, np.uint16),
    "v_sub_u16": _saturate(np.subtract, np.uint16),
}
