"""Functions of the vector ALU instructions: one row per opcode, "sources -> result" and a NumPy function.

Semantics: AMD CDNA3 ISA reference, chapter 12 (VOP1, VOP2, VOP3). Shift amounts use their low bits only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .numeric import exponent_f32, fma_f32, maximum, to_integer, transcendental
from .state import Array

u32, i32, u64, i64, f32 = np.uint32, np.int32, np.uint64, np.int64, np.float32


@dataclass(frozen=True)
class Op:
    """Source types, result type and the function from sources to result."""

    sources: tuple[str, ...]
    result: str
    function: Callable[..., Array]


_TYPES = {"u": "u32", "i": "i32", "f": "f32", "U": "u64", "h": "f16", "s": "u16"}
OPS: dict[str, Op] = {}


def _op(names: str, signature: str, function: Callable[..., Array]) -> None:
    sources, _, result = signature.partition(">")
    for name in names.split():
        OPS[name] = Op(tuple(_TYPES[letter] for letter in sources), _TYPES[result], function)


def _bits(count: int) -> np.uint32:
    return u32((1 << count) - 1)


# -- moves and bit operations ---------------------------------------------------------------------------------------
_op("v_mov_b32", "u>u", lambda a: a)
_op("v_mov_b64", "U>U", lambda a: a)
_op("v_accvgpr_write_b32", "u>u", lambda a: a)
_op("v_accvgpr_read_b32", "u>u", lambda a: a)
_op("v_not_b32", "u>u", lambda a: ~a)
_op("v_and_b32", "uu>u", lambda a, b: a & b)
_op("v_or_b32", "uu>u", lambda a, b: a | b)
_op("v_xor_b32", "uu>u", lambda a, b: a ^ b)
_op("v_and_or_b32", "uuu>u", lambda a, b, c: (a & b) | c)
_op("v_or3_b32", "uuu>u", lambda a, b, c: a | b | c)
_op("v_xad_u32", "uuu>u", lambda a, b, c: (a ^ b) + c)
_op("v_bfi_b32", "uuu>u", lambda a, b, c: (a & b) | (~a & c))
_op("v_lshlrev_b32", "uu>u", lambda a, b: b << (a & u32(31)))
_op("v_lshrrev_b32", "uu>u", lambda a, b: b >> (a & u32(31)))
_op("v_ashrrev_i32", "ui>i", lambda a, b: b >> (a & u32(31)).astype(i32))
_op("v_lshlrev_b64", "uU>U", lambda a, b: b << (a & u32(63)).astype(u64))
_op("v_lshrrev_b64", "uU>U", lambda a, b: b >> (a & u32(63)).astype(u64))
_op("v_lshl_or_b32", "uuu>u", lambda a, b, c: (a << (b & u32(31))) | c)
_op("v_bfe_u32", "uuu>u", lambda a, b, c: (a >> (b & u32(31))) & ((u32(1) << (c & u32(31))) - u32(1)))


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


def perm_b32(high: Array, low: Array, selector: Array) -> Array:
    """V_PERM_B32: each selector byte picks one of the 8 bytes {high, low}, a sign fill, 0x00 or 0xff."""
    high, low, selector = np.broadcast_arrays(high, low, selector)
    table = np.empty((*low.shape, 14), np.uint8)
    table[..., :4], table[..., 4:8] = _bytes(low), _bytes(high)
    table[..., 8:12] = (table[..., 1:8:2] >> 7) * np.uint8(0xFF)  # the sign of byte 1, 3, 5 or 7
    table[..., 12], table[..., 13] = 0, 0xFF
    picked = np.take_along_axis(table, np.minimum(_bytes(selector), 13), axis=-1)
    return picked.view(u32)[..., 0]


def _bytes(words: Array) -> Array:
    return np.array(words[..., None], u32, order="C").view(np.uint8)


_op("v_perm_b32", "uuu>u", perm_b32)


# -- integer arithmetic ---------------------------------------------------------------------------------------------
_op("v_add_u32", "uu>u", lambda a, b: a + b)
_op("v_sub_u32", "uu>u", lambda a, b: a - b)
_op("v_subrev_u32", "uu>u", lambda a, b: b - a)
_op("v_add3_u32", "uuu>u", lambda a, b, c: a + b + c)
_op("v_lshl_add_u32", "uuu>u", lambda a, b, c: (a << (b & u32(31))) + c)
_op("v_add_lshl_u32", "uuu>u", lambda a, b, c: (a + b) << (c & u32(31)))
_op("v_mul_lo_u32", "uu>u", lambda a, b: a * b)
_op("v_mul_hi_u32", "uu>u", lambda a, b: ((a.astype(u64) * b.astype(u64)) >> u64(32)).astype(u32))
_op("v_mul_hi_i32", "ii>i", lambda a, b: ((a.astype(i64) * b.astype(i64)) >> i64(32)).astype(i32))
_op("v_mul_u32_u24", "uu>u", lambda a, b: (a & _bits(24)) * (b & _bits(24)))
_op("v_mad_u32_u24", "uuu>u", lambda a, b, c: (a & _bits(24)) * (b & _bits(24)) + c)


def _s24(a: Array) -> Array:
    return (a.astype(i32) << i32(8)) >> i32(8)


_op("v_mul_i32_i24", "ii>i", lambda a, b: _s24(a) * _s24(b))
for _t in ("u", "i"):
    _op(f"v_min_{_t}32", f"{_t}{_t}>{_t}", np.minimum)
    _op(f"v_max_{_t}32", f"{_t}{_t}>{_t}", np.maximum)
    _op(f"v_max3_{_t}32", f"{_t * 3}>{_t}", lambda a, b, c: np.maximum(np.maximum(a, b), c))
_op("v_lshlrev_b16", "ss>s", lambda a, b: b << (a & np.uint16(15)))


# -- floating point -------------------------------------------------------------------------------------------------
_op("v_add_f32", "ff>f", lambda a, b: a + b)
_op("v_mul_f32", "ff>f", lambda a, b: a * b)
_op("v_fma_f32", "fff>f", fma_f32)
_op("v_max_f32", "ff>f", maximum)
_op("v_max3_f32", "fff>f", lambda a, b, c: maximum(maximum(a, b), c))


_op("v_ldexp_f32", "fi>f", lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b, -400, 400)).astype(f32))
_op("v_exp_f32", "f>f", lambda a: transcendental(np.exp2, a))
_op("v_rcp_f32", "f>f", lambda a: transcendental(np.reciprocal, a))


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

# -- conversions ----------------------------------------------------------------------------------------------------
_op("v_cvt_f32_i32", "i>f", lambda a: a.astype(f32))
_op("v_cvt_f32_u32", "u>f", lambda a: a.astype(f32))
_op("v_cvt_i32_f32", "f>i", lambda a: to_integer(a, i32))
_op("v_cvt_u32_f32", "f>u", lambda a: to_integer(a, u32))
_op("v_cvt_f16_f32", "f>h", lambda a: a.astype(np.float16))
_op("v_cvt_f32_f16", "h>f", lambda a: a.astype(f32))


def _pack(low: Array, high: Array) -> Array:
    low, high = np.broadcast_arrays(low, high)
    return low.view(np.uint16).astype(u32) | (high.view(np.uint16).astype(u32) << u32(16))


def _toward_zero_f16(a: Array) -> Array:
    near = a.astype(np.float16)
    over = np.abs(near.astype(f32)) > np.abs(a)
    return np.where(over & np.isfinite(a), (near.view(np.uint16) - np.uint16(1)).view(np.float16), near)


_op("v_cvt_pkrtz_f16_f32", "ff>u", lambda a, b: _pack(_toward_zero_f16(a), _toward_zero_f16(b)))
_op("v_pack_b32_f16", "ss>u", _pack)

# -- the same with clamp: saturating ----------------------------------------------------------------------------------


def _saturate(operation: np.ufunc) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.clip(operation(a.astype(i64), b.astype(i64)), 0, 0xFFFFFFFF).astype(u32)


SATURATED = {"v_add_u32": _saturate(np.add), "v_sub_u32": _saturate(np.subtract)}
