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
    ("row_shl:3", np.where(PLACE + 3 < 16, LANES + 3, -1), True),
    ("row_shr:1", np.where(PLACE >= 1, LANES - 1, -1), True),
    ("row_ror:4", ROW + (PLACE - 4) % 16, True),
    ("row_mirror", ROW + 15 - PLACE, True),
    ("row_half_mirror", (LANES & ~7) + 7 - (LANES & 7), True),
    ("row_bcast:15", np.where(LANES >= 16, ROW - 1, -1), True),
    ("row_bcast:31", np.where(LANES >= 32, 31, -1), True),
    ("row_newbcast:5", ROW + 5, True),
    ("wave_shr:1", LANES - 1, True),
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
    code = "v_mov_b32_e32 v32, 7\nv_mov_b32_dpp v32, v10 row_mirror row_mask:0xa bank_mask:0x3"
    (result,) = run_lanes(code, [VALUE])
    written = ((LANES // 16) % 2 == 1) & (PLACE < 8)
    assert (result == np.where(written, VALUE[ROW + 15 - PLACE], 7)).all()


def test_dpp_reduction_as_compilers_write_it():
    code = "v_mov_b32_e32 v32, v10"
    for step in ("quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_mirror"):
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


def test_bpermute_pulls_and_permute_pushes():
    target = (LANES * 5 + 3) % 64
    address = (target * 4).astype(np.uint32)
    pulled, pushed = run_lanes(
        "ds_bpermute_b32 v32, v11, v10\nds_permute_b32 v33, v11, v10\ns_waitcnt lgkmcnt(0)",
        [VALUE, address],
        ["v32", "v33"],
    )
    assert (pulled == VALUE[target]).all()
    assert (pushed[target] == VALUE).all()


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


@pytest.mark.parametrize(
    ("offset", "source"),
    [
        ("swizzle(QUAD_PERM,3,2,1,0)", (LANES & ~3) + 3 - (LANES & 3)),
        ('swizzle(BITMASK_PERM,"0p1pi")', (LANES & 32) | (LANES & 0b01010) | 0b00100 | ((LANES & 1) ^ 1)),
        ("swizzle(SWAP,16)", LANES ^ 16),
        ("swizzle(REVERSE,8)", LANES ^ 7),
        ("swizzle(BROADCAST,8,3)", (LANES & ~7) + 3),
        ("0x401f", LANES ^ 16),
    ],
)
def test_swizzle(offset, source):
    (result,) = run_lanes(f"ds_swizzle_b32 v32, v10 offset:{offset}\ns_waitcnt lgkmcnt(0)", [VALUE])
    assert (result == VALUE[source]).all()


def test_lane_reads_and_writes():
    code = """
	v_readlane_b32 s20, v10, 17
	s_mov_b64 exec, 0xff00
	v_readfirstlane_b32 s21, v10
	s_mov_b64 exec, -1
	v_mov_b32_e32 v32, 0
	v_writelane_b32 v32, s20, 3
	v_mbcnt_lo_u32_b32 v33, -1, 0
	v_mbcnt_hi_u32_b32 v33, -1, v33"""
    written, counted, first = run_lanes(code, [VALUE], ["v32", "v33", "s21"])
    assert written[3] == VALUE[17] and written.sum() == VALUE[17]
    assert (counted == LANES).all()
    assert first[0] == VALUE[8]


def test_lane_that_nobody_wrote_cannot_be_read():
    run_lanes("v_writelane_b32 v20, 5, 3\nv_readlane_b32 s20, v20, 3\nv_mov_b32_e32 v32, s20")
    with pytest.raises(UndefinedRead):
        run_lanes("v_writelane_b32 v20, 5, 3\nv_readlane_b32 s20, v20, 4\nv_mov_b32_e32 v32, s20")
