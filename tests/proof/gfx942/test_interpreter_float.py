"""Floating point: exact rounding, minimum and maximum, conversions, division (CDNA3 ISA chapter 12, VOP1 to VOP3P)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_asm import run_lanes

from proof.gfx942 import UnknownInstruction
from proof.gfx942.numeric import fma_f32, fma_to_odd

F = np.float32
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def words(*values: float) -> list[np.ndarray]:
    return [np.full(64, F(v)) for v in values]


def nearest_f32(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact value, ties to even; searched among neighbours of the float64 rounding."""
    guess = F(float(exact))
    candidates = [guess, np.nextafter(guess, F(-np.inf)), np.nextafter(guess, F(np.inf))]
    candidates = [c for c in candidates if np.isfinite(c)]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1))


@settings(max_examples=300, deadline=None)
@given(finite, finite, finite)
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > Fraction(float(np.finfo(F).max)):
        return
    with np.errstate(all="ignore"):
        got = fma_f32(F([a]), F([b]), F([c]))[0]
    assert got == nearest_f32(exact)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tail", [1, -1])
def test_fma_needs_more_than_a_rounded_double(sign, tail):
    """sign * (1 + 2^-24 + tail * 2^-60): float64 drops the last term, and float32 would then see a tie."""
    a, b, c = F(sign * tail * 2.0**-30), F(2.0**-30), F(sign)
    one, half_ulp = F(1), F(sign * 2.0**-24)
    exact = Fraction(float(c)) + Fraction(float(half_ulp)) + Fraction(float(a)) * Fraction(float(b))
    total = fma_to_odd(F([a]), F([b]), np.array([float(c) + float(half_ulp)]))
    assert total.astype(F)[0] == nearest_f32(exact) != (c if tail > 0 else c + 2 * half_ulp)
    assert fma_f32(F([one]), F([c]), F([half_ulp]))[0] == c  # a true tie goes to even


CASES = [
    ("v_add_f32_e32 v32, v10, v11", (1.0, 2.0**-24), 1.0),
    ("v_add_f32_e64 v32, v10, -v11", (1.0, 0.25), 0.75),
    ("v_add_f32_e64 v32, |v10|, v11", (-1.0, 0.25), 1.25),
    ("v_mul_f32_e32 v32, v10, v11", (3.0, 2.0**-149), 3 * 2.0**-149),  # subnormals are kept
    ("v_fma_f32 v32, v10, v11, v12", (2.0, 3.0, 4.0), 10.0),
    ("v_fma_f32 v32, -v10, v11, 1.0", (2.0, 3.0), -5.0),
    ("v_mov_b32_e32 v32, v12\nv_fmac_f32_e32 v32, v10, v11", (2.0, 3.0, 4.0), 10.0),
    ("v_fmamk_f32 v32, v10, 0x40400000, v11", (2.0, 4.0), 10.0),
    ("v_max_f32_e32 v32, v10, v11", (float("nan"), 3.0), 3.0),
    ("v_max_f32_e32 v32, v10, v11", (-0.0, 0.0), 0.0),
    ("v_max3_f32 v32, v10, |v11|, v12", (1.0, -7.0, 3.0), 7.0),
    ("v_ldexp_f32 v32, v10, -3", (24.0,), 3.0),
    ("v_exp_f32_e32 v32, v10", (-3.0,), 0.125),
    ("v_exp_f32_e32 v32, v10", (-130.0,), 0.0),  # a subnormal result is flushed
    ("v_rcp_f32_e32 v32, v10", (3.0,), 1 / 3),
    ("v_fma_mix_f32 v32, v10, v11, v12", (2.0, 3.0, 4.0), 10.0),
]


@pytest.mark.parametrize(("code", "sources", "expected"), CASES, ids=range(len(CASES)))
def test_float_instruction(code, sources, expected):
    (result,) = run_lanes(code, words(*sources))
    got = result.view(F)[0]
    assert got == F(expected) and np.signbit(got) == np.signbit(F(expected))


INTEGER_CASES = [
    ("v_cvt_i32_f32_e32 v32, v10", np.float32(-2.9), -2),
    ("v_cvt_i32_f32_e32 v32, v10", np.float32(3e9), 2**31 - 1),
    ("v_cvt_i32_f32_e32 v32, v10", np.float32("nan"), 0),
    ("v_cvt_u32_f32_e32 v32, v10", np.float32(-1), 0),
    ("v_cvt_u32_f32_e32 v32, v10", np.float32(4e9), 4000000000),
    ("v_cvt_f16_f32_e32 v32, v10", np.float32(1 + 2.0**-11), 0x3C00),  # a tie goes to even
    ("v_cvt_f16_f32_e32 v32, v10", np.float32(1 + 3 * 2.0**-11), 0x3C02),
    ("v_cvt_pkrtz_f16_f32 v32, v10, v10", np.float32(-(1 + 3 * 2.0**-11)), 0xBC01BC01),
    ("v_cmp_lt_f32_e32 vcc, v10, v10\nv_cndmask_b32_e64 v32, 0, 1, vcc", np.float32("nan"), 0),
]


@pytest.mark.parametrize(("code", "source", "expected"), INTEGER_CASES, ids=range(len(INTEGER_CASES)))
def test_float_to_integer_instruction(code, source, expected):
    (result,) = run_lanes(code, [np.full(64, source)])
    assert result[0] == expected & 0xFFFFFFFF


def test_int_to_float_rounds_to_nearest_even():
    values = np.array([16777217, 16777219, -16777217, 2**31 - 1], np.int32)
    (result,) = run_lanes("v_cvt_f32_i32_e32 v32, v10", [np.tile(values, 16)])
    assert result.view(F)[:4].tolist() == [16777216.0, 16777220.0, -16777216.0, 2147483648.0]


def test_mixed_precision_reads_halves():
    halves = np.array([1.5, -2.0], np.float16).view(np.uint32)[0]
    code = "v_fma_mix_f32 v32, v10, v10, v11 op_sel:[0,1,0] op_sel_hi:[1,1,0]"
    (wide,) = run_lanes(code, [np.full(64, halves), F(3)])
    assert wide.view(F)[0] == 0.0


def test_packed_f32_selects_words():
    """op_sel picks the word for the low result, op_sel_hi for the high one; a constant is read as the low word."""
    code = """
	v_pk_mul_f32 v[32:33], v[10:11], v[12:13]
	v_pk_mul_f32 v[34:35], v[10:11], v[12:13] op_sel_hi:[1,0]
	v_pk_add_f32 v[36:37], v[10:11], 1.0 op_sel_hi:[1,0] neg_lo:[1,0] neg_hi:[1,0]
	v_pk_fma_f32 v[38:39], v[10:11], v[12:13], v[10:11] op_sel:[1,0,0] op_sel_hi:[0,1,1]"""
    out = run_lanes(code, words(2, 3, 5, 7), [f"v{n}" for n in range(32, 40)])
    assert [x.view(F)[0] for x in out] == [10, 21, 10, 15, -1, -2, 17, 17]
    with pytest.raises(UnknownInstruction, match="constant"):
        run_lanes("v_pk_add_f32 v[32:33], v[10:11], 1.0", words(2, 3))


DIVISION = """
	v_div_scale_f32 v20, s[20:21], v11, v11, v10
	v_div_scale_f32 v21, vcc, v10, v11, v10
	v_rcp_f32_e32 v22, v20
	v_fma_f32 v23, -v20, v22, 1.0
	v_fmac_f32_e32 v22, v23, v22
	v_mul_f32_e32 v23, v21, v22
	v_fma_f32 v24, -v20, v23, v21
	v_fmac_f32_e32 v23, v24, v22
	v_fma_f32 v24, -v20, v23, v21
	v_div_fmas_f32 v24, v24, v22, v23
	v_div_fixup_f32 v32, v24, v11, v10"""


def test_division_sequence_gives_the_rounded_quotient():
    """The sequence that compilers emit for an IEEE division, with V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP."""
    rng = np.random.default_rng(2)
    for spread in (10, 60, 126):
        a, b = (rng.normal(size=64) * 2.0 ** rng.integers(-spread, spread, 64) for _ in range(2))
        a, b = a.astype(F), b.astype(F)
        with np.errstate(all="ignore"):
            expected = a / b
        (result,) = run_lanes(DIVISION, [a, b])
        assert (result.view(F) == expected).all()


def test_division_of_special_values():
    nan, inf = np.nan, np.inf
    a = np.resize(F([0, 1, -1, 0, inf, inf, 1, nan, 2.0**-149, 3e38]), 64)
    b = np.resize(F([5, 0, 0, 0, 2, inf, -inf, 1, 2.0, 1e-38]), 64)
    with np.errstate(all="ignore"):
        expected = a / b
    (result,) = run_lanes(DIVISION, [a, b])
    assert np.array_equal(result.view(F), expected, equal_nan=True)
    assert (np.signbit(result.view(F)) == np.signbit(expected))[~np.isnan(expected)].all()
