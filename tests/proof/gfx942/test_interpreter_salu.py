"""Scalar instructions and branches (CDNA3 ISA chapter 5 and 12: SOP1, SOP2, SOPC, SOPK, SOPP)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from interpreter_asm import LANES, kernel, run_lanes, run_workgroup

from proof.gfx942 import Gfx942Device, MachineError, Memory, UndefinedRead, UnknownInstruction

# code with sources s10, s11; inputs; s20; SCC afterwards (None: not looked at)
CASES = [
    ("s_add_u32 s20, s10, s11", (0xFFFFFFFF, 2), 1, 1),
    ("s_add_u32 s20, s10, s11", (1, 2), 3, 0),
    ("s_add_i32 s20, s10, s11", (0x7FFFFFFF, 1), 0x80000000, 1),
    ("s_cmp_eq_u32 s10, s10\ns_addc_u32 s20, s10, s11", (1, 2), 4, 0),
    ("s_cmp_eq_u32 s10, s10\ns_subb_u32 s20, s10, s11", (5, 2), 2, 0),
    ("s_mul_i32 s20, s10, s11", (0x10001, 0x10001), 0x20001, None),
    ("s_mul_hi_u32 s20, s10, s11", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE, None),
    ("s_mul_hi_i32 s20, s10, s11", (0xFFFFFFFF, 2), 0xFFFFFFFF, None),
    ("s_and_b32 s20, s10, s11", (12, 10), 8, 1),
    ("s_and_b32 s20, s10, s11", (12, 3), 0, 0),
    ("s_andn2_b32 s20, s10, s11", (12, 10), 4, 1),
    ("s_xor_b32 s20, s10, s11", (12, 10), 6, 1),
    ("s_not_b32 s20, s10", (0xFFFFFFFF,), 0, 0),
    ("s_lshl_b32 s20, s10, s11", (3, 33), 6, 1),
    ("s_lshr_b32 s20, s10, 4", (0x80000000,), 0x08000000, 1),
    ("s_ashr_i32 s20, s10, 4", (0x80000000,), 0xF8000000, 1),
    ("s_bfe_u32 s20, s10, 0x80008", (0x12345678,), 0x56, 1),
    ("s_bfe_i32 s20, s10, 0x40004", (0xA5,), 0xFFFFFFFA, 1),
    ("s_bfe_i32 s20, s10, 0x1001f", (0x80000000,), 0xFFFFFFFF, 1),
    ("s_lshl2_add_u32 s20, s10, s11", (3, 5), 17, 0),
    ("s_min_i32 s20, s10, s11", (0xFFFFFFFF, 1), 0xFFFFFFFF, 1),
    ("s_max_u32 s20, s10, s11", (0xFFFFFFFF, 1), 0xFFFFFFFF, 1),
    ("s_abs_i32 s20, s10", (0xFFFFFFFD,), 3, 1),
    ("s_bcnt1_i32_b32 s20, s10", (0xF0F0,), 8, 1),
    ("s_brev_b32 s20, s10", (3,), 0xC0000000, None),
    ("s_movk_i32 s20, 0x8000", (), 0xFFFF8000, None),
    ("s_mov_b32 s20, s10\ns_addk_i32 s20, 0xffff", (5,), 4, 0),
    ("s_mov_b32 s20, s10\ns_mulk_i32 s20, 0x7", (5,), 35, None),
    ("s_cmp_lt_i32 s10, s11\ns_cselect_b32 s20, 1, 2", (0xFFFFFFFF, 0), 1, 1),
    ("s_cmp_lt_u32 s10, s11\ns_cselect_b32 s20, 1, 2", (0xFFFFFFFF, 0), 2, 0),
    ("s_cmpk_eq_i32 s10, 0xffff\ns_cselect_b32 s20, 1, 2", (0xFFFFFFFF,), 1, 1),
    ("s_bitcmp1_b32 s10, 4\ns_cselect_b32 s20, 1, 2", (16,), 1, 1),
    ("s_mov_b32 s20, 0\ns_bitset1_b32 s20, 5", (), 32, None),
]


@pytest.mark.parametrize(
    ("code", "sources", "expected", "scc"), CASES, ids=[f"{c[0].split()[0]}{n}" for n, c in enumerate(CASES)]
)
def test_scalar_instruction(code, sources, expected, scc):
    result, flag = run_lanes(code + "\ns_cselect_b32 s22, 1, 0", [], ["s20", "s22"], sources)
    assert hex(result[0]) == hex(expected)
    assert scc is None or flag[0] == scc


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("s_lshl_b64 s[20:21], s[10:11], 4", 0x123456789ABCDEF0 << 4),
        ("s_and_b64 s[20:21], s[10:11], 0xff", 0xF0),
        ("s_not_b64 s[20:21], s[10:11]", ~0x123456789ABCDEF0),
        ("s_mov_b64 s[20:21], -2", -2),
    ],
)
def test_64_bit_scalar_instruction(code, expected):
    low, high = run_lanes(code, [], ["s20", "s21"], (0x9ABCDEF0, 0x12345678))
    assert hex((int(high[0]) << 32) | int(low[0])) == hex(expected & 0xFFFFFFFFFFFFFFFF)


def test_saveexec_and_if_else():
    """The pattern of a divergent if/else: S_AND_SAVEEXEC, S_XOR, S_OR."""
    code = """
	v_cmp_gt_u32_e32 vcc, 16, v0
	s_and_saveexec_b64 s[20:21], vcc
	v_mov_b32_e32 v32, 1
	s_xor_b64 exec, exec, s[20:21]
	v_mov_b32_e32 v32, 2
	s_or_b64 exec, exec, s[20:21]"""
    (result,) = run_lanes(code)
    assert (result == np.where(LANES < 16, 1, 2)).all()


@pytest.mark.parametrize(("mask", "flag"), [("0xff", 1), ("0", 0)])
def test_saveexec_sets_scc_when_lanes_are_left(mask, flag):
    code = f"s_mov_b64 s[12:13], {mask}\ns_and_saveexec_b64 s[20:21], s[12:13]\ns_cselect_b32 s22, 1, 0"
    (result,) = run_lanes(code, [], ["s22"])
    assert result[0] == flag


def test_condition_survives_the_joining_of_batches():
    code = """
	v_readfirstlane_b32 s10, v0
	s_cmp_eq_u32 s10, 0
	s_cbranch_scc1 .Lskip
	s_nop 0
.Lskip:
	s_barrier
	s_cselect_b32 s11, 1, 2
	v_mov_b32_e32 v32, s11"""
    values, _ = run_workgroup(code, waves=3)
    assert values.reshape(3, 64)[:, 0].tolist() == [1, 2, 2]


def test_loop_counts_its_trips():
    code = """
	s_mov_b32 s10, 0
	v_mov_b32_e32 v32, 0
.Lloop:
	v_add_u32_e32 v32, 3, v32
	s_add_i32 s10, s10, 1
	s_cmp_lt_i32 s10, 5
	s_cbranch_scc1 .Lloop"""
    values, counts = run_workgroup(code, waves=3)
    assert (values == 15).all()
    assert counts["s_cbranch_scc1"] == 15 and counts["s_mov_b32"] == 3


DIVERGENT = """
	v_readfirstlane_b32 s10, v0
	v_mov_b32_e32 v32, 1
	s_cmp_lt_i32 s10, 128
	s_cbranch_scc1 .Lfew
	v_add_u32_e32 v32, 10, v32
.Lmore:
	v_add_u32_e32 v32, 1, v32
	s_sub_i32 s10, s10, 64
	s_cmp_gt_i32 s10, 0
	s_cbranch_scc1 .Lmore
.Lfew:
	s_barrier
	v_lshlrev_b32_e32 v32, 1, v32"""


@pytest.mark.parametrize("order", ["lockstep", "roundrobin", "forward", "reverse", random.Random(5)])
def test_waves_that_branch_differently_split_and_join(order):
    values, _ = run_workgroup(DIVERGENT, waves=4, order=order)
    assert values.reshape(4, 64)[:, 0].tolist() == [2, 2, 26, 28]


def test_registers_unwritten_by_one_branch_only():
    code = """
	v_readfirstlane_b32 s10, v0
	s_cmp_lt_i32 s10, 64
	s_cbranch_scc1 .Lskip
	s_mov_b32 s11, 5
.Lskip:
	s_barrier
	v_mov_b32_e32 v32, s11"""
    with pytest.raises(UndefinedRead, match="s11"):
        run_workgroup(code, waves=2)


def test_endless_loop_and_running_off_the_end():
    memory = Memory()
    with pytest.raises(MachineError, match="does not end"):
        Gfx942Device(memory).launch(kernel(".Lx:\ns_branch .Lx", args=0), (1, 1, 1), (64, 1, 1), [], max_steps=100)
    text = kernel("s_nop 0", args=0)
    text.instructions.pop()
    with pytest.raises(MachineError, match="past the end"):
        Gfx942Device(memory).launch(text, (1, 1, 1), (64, 1, 1), [])


def test_mode_changes_are_not_silently_ignored():
    with pytest.raises(UnknownInstruction, match="s_setreg"):
        run_lanes("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")
