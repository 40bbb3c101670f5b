"""Movement between lanes: DPP, permutes, swizzles, lane reads and writes (CDNA3 ISA 4.6, 11.4, 12)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import LANES, run_lanes

from proof.gfx942 import UndefinedRead, UnknownInstruction

VALUE = (LANES + 100).astype(np.uint32)
ROW, PLACE = LANES & ~15, LANES & 15

DPP = [
    ("quad_perm:[1,0,3,2]", LANES ^ 1, True),
    ("row_shr:1", np.where(PLACE >= 1, LANES - 1, -1), True),
    ("row_ror:4", ROW + (PLACE - 4) % 16, True),
    ("row_half_mirror", (LANES & ~7) + 7 - (LANES & 7), True),
    ("row_bcast:15", np.where(LANES >= 16, ROW - 1, -1), True),
    ("row_bcast:31", np.where(LANES >= 32, 31, -1), True),
]


@pytest.mark.parametrize(("pattern", "source", "_"), DPP, ids=[p[0] for p in DPP])
def test_dpp_pattern(pattern, source, _):
    """A lane without a source reads 0 with bound_ctrl, and keeps its old value without."""
    code = f"""
	v_mov_b32_e32 v32, 7
	v_mov_b32_e32 v33, 7
	v_mov_b32_dpp v32, v10 {pattern} row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_mov_b32_dpp v33, v10 {pattern} row_mask:0xf bank_mask:0xf"""
    zero, keep = run_lanes(code, [VALUE], ["v32", "v33"])
    assert (zero == np.where(source >= 0, VALUE[source], 0)).all()
    assert (keep == np.where(source >= 0, VALUE[source], 7)).all()


def test_dpp_masks_choose_rows_and_banks():
    code = "v_mov_b32_e32 v32, 7\nv_mov_b32_dpp v32, v10 row_half_mirror row_mask:0xa bank_mask:0x3"
    (result,) = run_lanes(code, [VALUE])
    written = ((LANES // 16) % 2 == 1) & (PLACE < 8)
    assert (result == np.where(written, VALUE[(LANES & ~7) + 7 - (LANES & 7)], 7)).all()


def test_dpp_reduction_as_compilers_write_it():
    code = "v_mov_b32_e32 v32, v10"
    for step in ("quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_ror:8"):
        code += f"\nv_add_u32_dpp v32, v32, v32 {step} row_mask:0xf bank_mask:0xf"
    (result,) = run_lanes(code, [VALUE])
    assert (result == np.repeat(VALUE.reshape(4, 16).sum(1), 16)).all()


def test_dpp_from_an_inactive_lane():
    code = """
	v_mov_b32_e32 v32, 7
	s_mov_b64 exec, 0x5
	v_mov_b32_dpp v32, v10 quad_perm:[1,0,2,3] row_mask:0xf bank_mask:0xf bound_ctrl:1
	s_mov_b64 exec, -1"""
    (result,) = run_lanes(code, [VALUE])
    assert result[:4].tolist() == [0, 7, VALUE[2], 7]


def test_unknown_dpp_pattern():
    with pytest.raises(UnknownInstruction):
        run_lanes("v_mov_b32_dpp v32, v10 row_xmask:1 row_mask:0xf bank_mask:0xf", [VALUE])


def test_bpermute_pulls():
    target = (LANES * 5 + 3) % 64
    code = "ds_bpermute_b32 v32, v11, v10\ns_waitcnt lgkmcnt(0)"
    (pulled,) = run_lanes(code, [VALUE, (target * 4).astype(np.uint32)])
    assert (pulled == VALUE[target]).all()


def test_bpermute_from_an_inactive_lane_gives_zero():
    code = """
	v_xor_b32_e32 v20, 4, v1
	v_mov_b32_e32 v32, 7
	s_mov_b64 exec, 0x5
	ds_bpermute_b32 v32, v20, v10
	ds_bpermute_b32 v33, v1, v10
	s_mov_b64 exec, -1
	s_waitcnt lgkmcnt(0)"""
    (result,) = run_lanes(code, [VALUE])
    assert result[:4].tolist() == [0, 7, 0, 7]


def test_lane_reads():
    code = """
	v_readlane_b32 s20, v10, 17
	s_mov_b64 exec, 0xff00
	v_readfirstlane_b32 s21, v10
	s_mov_b64 exec, -1
	v_mbcnt_lo_u32_b32 v32, -1, 0
	v_mbcnt_hi_u32_b32 v32, -1, v32"""
    counted, chosen, first = run_lanes(code, [VALUE], ["v32", "s20", "s21"])
    assert (counted == LANES).all()
    assert (chosen[0], first[0]) == (VALUE[17], VALUE[8])


def test_an_unwritten_lane_cannot_be_read():
    code = (
        "s_mov_b64 exec, 8\nv_mov_b32_e32 v20, 5\ns_mov_b64 exec, -1\nv_readlane_b32 s20, v20, {lane}\nv_mov_b32 v32, 0"
    )
    run_lanes(code.format(lane=3))
    with pytest.raises(UndefinedRead):
        run_lanes(code.format(lane=4))
