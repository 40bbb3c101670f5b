"""Vector integer and bit instructions against hand-computed values (AMD CDNA3 ISA, chapter 12: VOP1, VOP2, VOP3)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import LANES, run_lanes

from proof.gfx942 import OutOfBounds, UndefinedRead, UnknownInstruction

# instruction with sources v10, v11, v12 and result v32; sources; result
CASES = [
    ("v_mov_b32_e32 v32, v10", [0xDEADBEEF], 0xDEADBEEF),
    ("v_mov_b32_e32 v32, -1", [], 0xFFFFFFFF),
    ("v_mov_b32_e32 v32, 0.5", [], 0x3F000000),
    ("v_not_b32_e32 v32, v10", [0x0F0F0000], 0xF0F0FFFF),
    ("v_and_b32_e32 v32, v10, v11", [0xFF00FF00, 0x0FF00FF0], 0x0F000F00),
    ("v_or_b32_e32 v32, v10, v11", [0xFF00FF00, 0x0FF00FF0], 0xFFF0FFF0),
    ("v_xor_b32_e32 v32, v10, v11", [0xFF00FF00, 0x0FF00FF0], 0xF0F0F0F0),
    ("v_and_or_b32 v32, v10, v11, v12", [0xFF, 0x3C, 0x100], 0x13C),
    ("v_or3_b32 v32, v10, v11, v12", [1, 2, 4], 7),
    ("v_bfi_b32 v32, v10, v11, v12", [0xFFFF0000, 0x12345678, 0x9ABCDEF0], 0x1234DEF0),
    ("v_lshlrev_b32_e32 v32, v10, v11", [36, 3], 48),  # a shift of 36 is one of 4
    ("v_lshrrev_b32_e32 v32, 4, v10", [0x80000000], 0x08000000),
    ("v_ashrrev_i32_e32 v32, 4, v10", [0x80000000], 0xF8000000),
    ("v_lshl_or_b32 v32, v10, 8, v11", [0x12, 0x34], 0x1234),
    ("v_lshl_add_u32 v32, v10, 4, v11", [0x10000001, 5], 0x15),
    ("v_add_lshl_u32 v32, v10, v11, 2", [3, 4], 28),
    ("v_add3_u32 v32, v10, v11, v12", [0xFFFFFFFF, 1, 7], 7),
    ("v_bfe_u32 v32, v10, 8, 8", [0x12345678], 0x56),
    ("v_bfe_i32 v32, v10, 4, 4", [0x000000A5], 0xFFFFFFFA),
    ("v_bfe_u32 v32, v10, 0, 0", [0xFFFFFFFF], 0),
    ("v_bfrev_b32_e32 v32, v10", [0x00000003], 0xC0000000),
    ("v_bcnt_u32_b32 v32, v10, v11", [0xF0F0, 100], 108),
    ("v_perm_b32 v32, v10, v11, v12", [0x77665544, 0x33221100, 0x07000403], 0x77004433),
    ("v_perm_b32 v32, v10, v11, v12", [0x80000000, 0x00000000, 0x0D0C0B0A], 0xFF00FF00),  # 0xff, 0, signs
    ("v_add_u32_e32 v32, v10, v11", [0xFFFFFFFF, 3], 2),
    ("v_add_u32_e64 v32, v10, v11 clamp", [0xFFFFFFFF, 3], 0xFFFFFFFF),
    ("v_sub_u32_e32 v32, v10, v11", [1, 3], 0xFFFFFFFE),
    ("v_sub_u32_e64 v32, v10, v11 clamp", [1, 3], 0),
    ("v_subrev_u32_e32 v32, v10, v11", [1, 3], 2),
    ("v_mul_lo_u32 v32, v10, v11", [0x10001, 0x10001], 0x00020001),
    ("v_mul_hi_u32 v32, v10, v11", [0xFFFFFFFF, 0xFFFFFFFF], 0xFFFFFFFE),
    ("v_mul_hi_i32 v32, v10, v11", [0xFFFFFFFF, 2], 0xFFFFFFFF),
    ("v_mul_u32_u24_e32 v32, v10, v11", [0xFF000003, 5], 15),
    ("v_mul_i32_i24_e32 v32, v10, v11", [0x00FFFFFF, 5], 0xFFFFFFFB),
    ("v_mad_u32_u24 v32, v10, v11, v12", [0xFF000003, 5, 2], 17),
    ("v_min_i32_e32 v32, v10, v11", [0xFFFFFFFF, 1], 0xFFFFFFFF),
    ("v_min_u32_e32 v32, v10, v11", [0xFFFFFFFF, 1], 1),
    ("v_max_i32_e32 v32, v10, v11", [0xFFFFFFFF, 1], 1),
    ("v_pack_b32_f16 v32, v10, v11", [0xAAAA1234, 0xBBBB5678], 0x56781234),
    ("v_pack_b32_f16 v32, v10, v11 op_sel:[1,0,0]", [0xAAAA1234, 0xBBBB5678], 0x5678AAAA),
    ("v_lshlrev_b16_e32 v32, 4, v10", [0xABCD1234], 0x2340),
    ("v_pk_add_u16 v32, v10, v11", [0xFFFF0001, 0x00020003], 0x00010004),
    ("v_add_u32_sdwa v32, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_0",
     [0x00FF0000, 0xABCD0101], 0x200),
    ("v_lshlrev_b16_sdwa v32, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3",
     [4, 0xAB000000], 0x0AB0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "sources", "expected"), CASES, ids=[c[0].split()[0] + str(n) for n, c in enumerate(CASES)]
)
def test_integer_instruction(code, sources, expected):
    (result,) = run_lanes(code, [np.uint32(s) for s in sources])
    assert [hex(x) for x in set(result.tolist())] == [hex(expected & 0xFFFFFFFF)]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("v_mov_b64_e32 v[32:33], v[10:11]", 0x123456789ABCDEF0),
        ("v_mad_u64_u32 v[32:33], s[20:21], v10, v11, 7", 0x9ABCDEF0 * 0x12345678 + 7),
        ("v_lshlrev_b64 v[32:33], 68, v[10:11]", 0x23456789ABCDEF00),  # a shift of 68 is one of 4
        ("v_lshrrev_b64 v[32:33], v11, v[10:11]", 0x12),  # 0x38, the low bits of v11
    ],
)
def test_64_bit_instruction(code, expected):
    low, high = run_lanes(code, [np.uint32(0x9ABCDEF0), np.uint32(0x12345678)], ["v32", "v33"])
    assert hex((int(high[0]) << 32) | int(low[0])) == hex(expected & 0xFFFFFFFFFFFFFFFF)


def test_a_32_bit_sum_by_the_64_bit_instruction_has_an_undefined_high_half():
    code = "s_mov_b64 exec, 3\nv_mov_b32_e32 v21, 1\ns_mov_b64 exec, -1\nv_mov_b32_e32 v20, 7\n"
    code += "v_mad_u64_u32 v[20:21], s[20:21], v10, 5, v[20:21]\n"
    assert (run_lanes(code, [LANES], ["v20"])[0] == 5 * LANES + 7).all()
    with pytest.raises(UndefinedRead, match="lane 2 of wave 0"):
        run_lanes(code, [LANES], ["v21"])
    assert (run_lanes(code + "s_mov_b64 exec, 3\nv_mov_b32_e32 v32, v21", [LANES], ["s20"])[0] == 0).all()


def test_carry_chain_adds_64_bit_numbers():
    """V_ADD_CO_U32 writes the carry per lane, V_ADDC_CO_U32 takes it (CDNA3 ISA 12.9, VOP2)."""
    code = "v_add_co_u32_e32 v32, vcc, v10, v12\nv_addc_co_u32_e32 v33, vcc, v11, v13, vcc"
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2**63, (2, 64), dtype=np.uint64)
    words = [x.astype(np.uint32) for pair in (a, b) for x in (pair, pair >> np.uint64(32))]
    low, high = run_lanes(code, words, ["v32", "v33"])
    assert ((low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))) == a + b).all()


def test_subtract_with_borrow():
    code = "v_sub_co_u32_e32 v32, vcc, v10, v11\nv_subbrev_co_u32_e32 v33, vcc, 0, v12, vcc"
    low, high = run_lanes(
        code, [np.where(LANES < 3, 0, 9).astype(np.uint32), np.uint32(1), np.uint32(5)], ["v32", "v33"]
    )
    assert (low[:3] == 0xFFFFFFFF).all() and (low[3:] == 8).all()
    assert (high[:3] == 4).all() and (high[3:] == 5).all()


def test_exec_masks_results_and_compare_bits():
    """Inactive lanes keep their value; VOPC writes 0 for them (CDNA3 ISA 3.3, EXEC mask)."""
    code = """
	v_mov_b32_e32 v32, 1
	s_mov_b64 exec, 0xff
	v_mov_b32_e32 v32, 2
	v_cmp_lt_u32_e64 s[20:21], v0, 16
	s_mov_b64 exec, -1"""
    result, low, high = run_lanes(code, [], ["v32", "s20", "s21"])
    assert (result[:8] == 2).all() and (result[8:] == 1).all()
    assert low[0] == 0xFF and high[0] == 0


def test_unwritten_register_is_an_error_but_a_copy_of_it_is_not():
    with pytest.raises(UndefinedRead, match="register 20"):
        run_lanes("v_add_u32_e32 v32, v20, v0")
    run_lanes("v_mov_b32_e32 v21, v20\nv_mov_b32_e32 v32, 0")
    with pytest.raises(UndefinedRead, match="register 21"):
        run_lanes("v_mov_b32_e32 v21, v20\nv_add_u32_e32 v32, v21, v0")


def test_select_needs_only_the_side_it_picks():
    code = """
	s_mov_b64 exec, 0xf
	v_mov_b32_e32 v20, 7
	s_mov_b64 exec, -1
	v_cmp_gt_u32_e32 vcc, {limit}, v0
	v_cndmask_b32_e32 v32, 0, v20, vcc"""
    (result,) = run_lanes(code.format(limit=4))
    assert (result == np.where(LANES < 4, 7, 0)).all()
    with pytest.raises(UndefinedRead, match="lane 4"):
        run_lanes(code.format(limit=5))


def test_unknown_instruction_operand_and_register_are_errors():
    with pytest.raises(UnknownInstruction, match="v_frobnicate_b32"):
        run_lanes("v_frobnicate_b32 v32, v0")
    with pytest.raises(UnknownInstruction, match="fancy"):
        run_lanes("v_add_u32_e64 v32, v0, v0 fancy:1")
    with pytest.raises(OutOfBounds, match="v77"):
        run_lanes("v_mov_b32_e32 v77, 0")
