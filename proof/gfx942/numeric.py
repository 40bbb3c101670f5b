"""Floating point exactly as the hardware rounds it, on NumPy arrays."""

from __future__ import annotations

import numpy as np

from .state import Array


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """Fused a*b + c of float32 with one rounding to nearest even."""
    return fma_to_odd(a, b, c).astype(np.float32)


def fma_to_odd(a: Array, b: Array, c: Array) -> Array:
    """a*b + c of float32 in float64, rounded to odd.

    The product is exact in float64. A sum rounded to odd (Boldo and Melquiond, 2008) can be rounded once more, also
    after scaling by a power of two, with the same result as one rounding of the exact value.
    """
    product = np.asarray(a).astype(np.float64) * np.asarray(b).astype(np.float64)
    addend = np.asarray(c).astype(np.float64)
    total = np.asarray(product + addend)
    if (addend == 0).all():
        return total
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    fix = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    if not fix.any():
        return total
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(fix, bits + toward, bits).view(np.float64)


def flush_f32(x: Array) -> Array:
    """Replace subnormal float32 by zero of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def transcendental(function: np.ufunc, x: Array) -> Array:
    """A transcendental instruction: correctly rounded from float64, subnormals flushed on both sides."""
    return flush_f32(function(flush_f32(x).astype(np.float64)).astype(np.float32))


def maximum(a: Array, b: Array) -> Array:
    """IEEE maxNum with -0 < +0."""
    return np.where((a == b) & (a == 0), np.where(np.signbit(a), b, a), np.fmax(a, b)).astype(np.result_type(a, b))


def to_integer(x: Array, dtype: type[np.generic]) -> Array:
    """Float to integer: truncate, saturate, NaN gives 0."""
    info = np.iinfo(dtype)  # type: ignore[type-var]
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=info.max, neginf=info.min)
    return np.clip(wide, info.min, info.max).astype(np.int64).astype(dtype)


def exponent_f32(x: Array) -> Array:
    return (np.asarray(x).view(np.uint32) >> np.uint32(23)).astype(np.int32) & 0xFF


def is_denormal(x: Array) -> Array:
    """Nonzero with a zero exponent field (float32)."""
    return (np.abs(x) < np.float32(2.0**-126)) & (x != 0)


def bf16_to_f32(halves: Array) -> Array:
    """Widen uint16 bfloat16 bits."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
