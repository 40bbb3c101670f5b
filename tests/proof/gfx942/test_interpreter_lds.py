"""LDS: data movement, bounds, waits, barriers; planted races are found under every order (CDNA3 ISA chapter 11)."""

from __future__ import annotations

import random

import numpy as np
import pytest
from interpreter_asm import LANES, kernel, run_lanes, run_workgroup

from proof.gfx942 import DataRace, Gfx942Device, Memory, MissingWait, OutOfBounds, UndefinedRead
from proof.gfx942.lds import Lds

ORDERS = ["lockstep", "roundrobin", "forward", "reverse", random.Random(11)]
VALUE = (LANES * 0x01010101).astype(np.uint32)


def test_reads_and_writes_of_every_width():
    code = """
	v_lshlrev_b32_e32 v20, 4, v0
	ds_write_b128 v20, v[10:13]
	ds_read_b64 v[32:33], v20 offset:8
	ds_read_u8 v34, v20 offset:1
	ds_read_u16 v35, v20 offset:6
	ds_write_b8 v20, v10 offset:12
	ds_write_b16 v20, v11 offset:14
	ds_read_b32 v36, v20 offset:12
	s_waitcnt lgkmcnt(0)"""
    inputs = [np.uint32(n) for n in (0x83828180, 0x87868584, 0x8B8A8988, 0x8F8E8D8C)]
    out = run_lanes(code, inputs, [f"v{n}" for n in range(32, 37)], lds=1024)
    assert [hex(x[5]) for x in out] == ["0x8b8a8988", "0x8f8e8d8c", "0x81", "0x8786", "0x85848d80"]


def test_two_address_forms_scale_their_offsets():
    """read2/write2 count in elements, the st64 forms in 64 elements (CDNA3 ISA 11.3)."""
    code = """
	v_lshlrev_b32_e32 v20, 2, v0
	ds_write2st64_b32 v20, v10, v11 offset0:1 offset1:3
	ds_read_b32 v32, v20 offset:256
	ds_read_b32 v33, v20 offset:768
	v_lshlrev_b32_e32 v21, 3, v0
	ds_read2_b32 v[34:35], v20 offset0:64 offset1:192
	ds_write2_b64 v21, v[10:11], v[11:12] offset0:128 offset1:192
	s_waitcnt lgkmcnt(0)
	ds_read2st64_b64 v[36:39], v21 offset0:2 offset1:3
	s_waitcnt lgkmcnt(0)"""
    a, b, c = VALUE, VALUE + 1, VALUE + 2
    out = run_lanes(code, [a, b, c], [f"v{n}" for n in range(32, 40)], lds=4096)
    for got, expected in zip(out, [a, b, a, b, a, b, b, c], strict=True):
        assert (got == expected).all()


def test_each_lane_that_adds_sees_the_sum_before_it():
    code = """
	v_mov_b32_e32 v20, 0
	ds_write_b32 v20, v20
	s_waitcnt lgkmcnt(0)
	ds_add_rtn_u32 v32, v20, v0
	ds_read_b32 v33, v20
	s_waitcnt lgkmcnt(0)"""
    before, total = run_lanes(code, [], ["v32", "v33"], lds=16)
    assert (total == sum(range(64))).all()
    assert (before == LANES * (LANES - 1) // 2).all()


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ("ds_read_b32 v32, v1", UndefinedRead, "offset 0 that were not written"),
        ("ds_write_b32 v1, v0 offset:4", OutOfBounds, "offset 256"),
        ("ds_write_b128 v1, v[10:13]", OutOfBounds, "16 bytes"),
        ("v_mov_b32_e32 v2, -4\nds_write_b32 v2, v0", OutOfBounds, "offset 4294967292"),
        ("ds_write_b32 v1, v0\nds_read_b32 v32, v1\nv_add_u32_e32 v32, 1, v32", MissingWait, "register 32"),
        ("v_mov_b32_e32 v2, 0\nds_write_b32 v2, v0", DataRace, "different values"),
    ],
)
def test_lds_error(code, error, match):
    with pytest.raises(error, match=match):
        run_lanes(code, [VALUE] * 4, lds=256)


def test_lds_of_workgroups_is_separate():
    body = """
	s_load_dwordx2 s[6:7], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	v_mov_b32_e32 v2, s2
	ds_write_b32 v1, v2
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read_b32 v3, v1
	s_lshl_b32 s3, s2, 8
	v_add_u32_e32 v4, s3, v1
	s_waitcnt lgkmcnt(0)
	global_store_dword v4, v3, s[6:7]"""
    memory = Memory()
    out = memory.empty((5, 64), np.uint32)
    Gfx942Device(memory, lockstep_rows=2).launch(kernel(body, args=1, lds=256), (5, 1, 1), (64, 1, 1), [out])
    assert (memory.read(out) == np.arange(5)[:, None]).all()


# Every wave writes its thread numbers; then each reads its neighbour's.
EXCHANGE = """
	ds_write_b32 v1, v0
	{wait}
	{barrier}
	v_xor_b32_e32 v2, 0x100, v1
	ds_read_b32 v32, v2
	s_waitcnt lgkmcnt(0)"""


@pytest.mark.parametrize("order", ORDERS)
def test_exchange_through_lds(order):
    code = EXCHANGE.format(wait="s_waitcnt lgkmcnt(0)", barrier="s_barrier")
    values, _ = run_workgroup(code, waves=2, lds=512, order=order)
    assert (values == np.arange(128) ^ 64).all()


@pytest.mark.parametrize("order", ORDERS)
def test_missing_barrier_is_found(order):
    """The error depends on the order: the reader is too early, or the detector sees the unordered accesses."""
    code = EXCHANGE.format(wait="s_waitcnt lgkmcnt(0)", barrier="s_nop 0")
    with pytest.raises((DataRace, UndefinedRead)):
        run_workgroup(code, waves=2, lds=512, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_missing_wait_before_the_barrier_is_found(order):
    code = EXCHANGE.format(wait="s_nop 0", barrier="s_barrier")
    with pytest.raises(DataRace, match="since the last barrier"):
        run_workgroup(code, waves=2, lds=512, order=order)


# The public kernels' mistake: behind a read of buffer B, another wave's oversized write to buffer A reaches into B.
WRITE_AFTER_READ = """
	v_add_u32_e32 v3, 5, v0
	ds_write_b32 v1, v3
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read_b32 v32, v1
	v_mov_b32_e32 v4, 0
	v_xor_b32_e32 v2, 0x100, v1
	s_waitcnt lgkmcnt(0)
	{barrier}
	ds_write_b32 v2, v4
	s_waitcnt lgkmcnt(0)"""


@pytest.mark.parametrize("order", ORDERS)
def test_write_after_read_race_is_found(order):
    with pytest.raises(DataRace, match="LDS bytes"):
        run_workgroup(WRITE_AFTER_READ.format(barrier="s_nop 0"), waves=2, lds=512, order=order)
    values, _ = run_workgroup(WRITE_AFTER_READ.format(barrier="s_barrier"), waves=2, lds=512, order=order)
    assert (values == np.arange(128) + 5).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("writer", [0, 1, 2])
def test_a_write_to_an_address_that_several_waves_read(order, writer):
    """All waves read the same 256 bytes, then one of them overwrites these without a barrier."""
    code = f"""
	v_and_b32_e32 v2, 63, v0
	v_lshlrev_b32_e32 v2, 2, v2
	v_lshrrev_b32_e32 v3, 6, v0
	v_readfirstlane_b32 s10, v3
	s_cmp_lg_u32 s10, 0
	s_cbranch_scc1 .Lfilled
	ds_write_b32 v2, v0
.Lfilled:
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read_b32 v32, v2
	s_waitcnt lgkmcnt(0)
	s_cmp_lg_u32 s10, {writer}
	s_cbranch_scc1 .Lend
	ds_write_b32 v2, v0
	s_waitcnt lgkmcnt(0)
.Lend:"""
    with pytest.raises(DataRace, match="another wave"):
        run_workgroup(code, waves=3, lds=256, order=order)


SAME_VALUE = """
	v_and_b32_e32 v2, 63, v0
	v_lshlrev_b32_e32 v2, 2, v2
	v_mov_b32_e32 v3, {value}
	ds_write_b32 v2, v3
	s_waitcnt lgkmcnt(0)
	{barrier}
	ds_read_b32 v32, v2
	s_waitcnt lgkmcnt(0)"""


@pytest.mark.parametrize("order", ORDERS)
def test_redundant_writes_can_be_allowed(order):
    """Waves that wrote the same value may also read it back at once; different values stay a race."""
    for barrier in ("s_barrier", "s_nop 0"):
        code = SAME_VALUE.format(value=5, barrier=barrier)
        values, _ = run_workgroup(code, waves=2, lds=256, order=order, redundant_writes=True)
        assert (values == 5).all()
        with pytest.raises(DataRace):
            run_workgroup(code, waves=2, lds=256, order=order)
        with pytest.raises(DataRace):
            run_workgroup(SAME_VALUE.format(value="v0", barrier=barrier), lds=256, order=order, redundant_writes=True)


@pytest.mark.parametrize("order", ORDERS)
def test_redundant_writes_do_not_excuse_a_reader(order):
    code = """
	v_readfirstlane_b32 s10, v0
	v_and_b32_e32 v2, 63, v0
	v_lshlrev_b32_e32 v2, 2, v2
	v_mov_b32_e32 v32, 5
	s_cmp_gt_u32 s10, 64
	s_cbranch_scc1 .Lreader
	ds_write_b32 v2, v32
	s_branch .Lend
.Lreader:
	ds_read_b32 v32, v2
.Lend:
	s_waitcnt lgkmcnt(0)"""
    with pytest.raises((DataRace, UndefinedRead)):
        run_workgroup(code, waves=3, lds=256, order=order, redundant_writes=True)


def test_orders_show_the_effect_of_a_race(monkeypatch):
    """Overlooked, the race destroys one wave's data or the other's, or none's, by the order."""
    monkeypatch.setattr(Lds, "_race", lambda *found: None)
    code = WRITE_AFTER_READ.format(barrier="s_nop 0")
    right = np.arange(128) + 5
    wrong = {}
    for order in ("lockstep", "forward", "reverse"):
        values, _ = run_workgroup(code, waves=2, lds=512, order=order)
        wrong[order] = np.flatnonzero((values != right).reshape(2, 64).any(1)).tolist()
    assert wrong == {"lockstep": [], "forward": [1], "reverse": [0]}


def test_bytes_of_one_word_written_by_two_waves_are_no_race():
    code = """
	v_lshrrev_b32_e32 v2, 6, v0
	v_and_b32_e32 v3, 63, v0
	v_lshl_add_u32 v4, v3, 2, v2
	ds_write_b8 v4, v0
	s_waitcnt lgkmcnt(0)
	s_barrier
	v_lshlrev_b32_e32 v5, 2, v3
	ds_read_b32 v32, v5
	s_waitcnt lgkmcnt(0)"""
    values, _ = run_workgroup(code, waves=4, lds=256)
    assert (values.view(np.uint8).reshape(4, 64, 4) == (LANES[:, None] + np.array([0, 64, 128, 192]))).all()


def test_atomics_of_two_waves_do_not_race_but_a_plain_read_does():
    code = """
	v_mov_b32_e32 v2, 0
	v_mov_b32_e32 v3, 1
	v_cmp_eq_u32_e32 vcc, 0, v0
	s_and_saveexec_b64 s[10:11], vcc
	ds_write_b32 v2, v2
	s_mov_b64 exec, s[10:11]
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_add_u32 v2, v3
	s_waitcnt lgkmcnt(0)
	{barrier}
	ds_read_b32 v32, v2
	s_waitcnt lgkmcnt(0)"""
    values, _ = run_workgroup(code.format(barrier="s_barrier"), waves=3, lds=4, order="reverse")
    assert (values == 192).all()
    for order in ("lockstep", "roundrobin"):
        with pytest.raises(DataRace, match="atomically"):
            run_workgroup(code.format(barrier="s_nop 0"), waves=3, lds=4, order=order)


def test_wave_that_ended_does_not_hold_up_a_barrier():
    code = """
	v_readfirstlane_b32 s10, v0
	v_mov_b32_e32 v32, 1
	s_cmp_eq_u32 s10, 0
	s_cbranch_scc1 .Lend
	s_barrier
.Lend:"""
    values, _ = run_workgroup(code, waves=2)
    assert (values == 1).all()
