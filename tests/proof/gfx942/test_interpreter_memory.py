"""Global and buffer memory, scalar loads (CDNA3 ISA chapters 7, 9, 10)."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_asm import LANES, POINTERS, kernel

from proof.gfx942 import (
    DataRace,
    Gfx942Device,
    MachineError,
    Memory,
    MissingWait,
    OutOfBounds,
    UndefinedRead,
    UnknownInstruction,
)


def launch(body, source, result_words=64, grid=1, threads=64, result=None, rows=256, redundant_writes=False, **options):
    """Run `body` with `source` in s[4:5] and a result buffer in s[6:7]; returns the result's values."""
    memory = Memory()
    given = memory.add(source, "source")
    out = memory.add(result, "result") if result is not None else memory.empty((result_words,), np.uint32, "result")
    code = kernel(POINTERS + body, **options)
    Gfx942Device(memory, rows).launch(
        code, (grid, 1, 1), (threads, 1, 1), [given, out], redundant_writes=redundant_writes
    )
    return memory.read(out, unwritten=0xEE)


def test_global_loads_and_stores_of_every_width():
    data = np.arange(1024, dtype=np.uint8)
    body = """
	v_lshlrev_b32_e32 v2, 4, v0
	global_load_dwordx4 v[10:13], v2, s[4:5]
	global_load_ubyte v14, v2, s[4:5] offset:9
	global_load_ushort v15, v2, s[4:5] offset:2
	s_waitcnt vmcnt(0)
	global_store_dwordx4 v2, v[10:13], s[6:7]
	global_store_dword v2, v15, s[6:7] offset:1024
	global_store_byte v2, v14, s[6:7] offset:1028
	global_store_short v2, v15, s[6:7] offset:1030"""
    result = launch(body, data, 512)
    assert (result[:256].view(np.uint8) == data.astype(np.uint8)).all()
    first, rest = 16 * LANES, result[256:].reshape(64, 4)
    half = ((first + 2) & 255) + 256 * ((first + 3) & 255)
    assert (rest[:, 0] == half).all()
    assert ((rest[:, 1] & 0xFF) == ((first + 9) & 255)).all() and (rest[:, 1] >> 16 == half).all()


def test_64_bit_addresses_and_negative_offsets():
    body = """
	v_mov_b32_e32 v2, s4
	v_mov_b32_e32 v3, s5
	v_add_co_u32_e32 v2, vcc, 64, v2
	v_addc_co_u32_e32 v3, vcc, 0, v3, vcc
	global_load_dword v32, v[2:3], off offset:-60
	s_waitcnt vmcnt(0)
	global_store_dword v1, v32, s[6:7]"""
    result = launch(body, np.arange(64, dtype=np.uint32))
    assert (result == 1).all()


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("global_load_dword v32, v1, s[4:5] offset:4", OutOfBounds, r"source \+ 256"),
        ("global_store_dword v1, v0, s[6:7] offset:-4", OutOfBounds, "source"),
        ("global_load_dword v32, v1, s[6:7]", UndefinedRead, r"result \+ 0"),
        ("global_load_dword v32, v1, s[4:5]\nv_add_u32_e32 v32, 1, v32", MissingWait, "register 32"),
        ("global_load_dword v32, v1, s[4:5]\nv_mov_b32_e32 v32, 1", MissingWait, "overwritten"),
        ("s_load_dword s20, s[4:5], 0x0\ns_add_i32 s20, s20, 1", MissingWait, "s20"),
        ("s_load_dword s20, s[4:5], 0x0\ns_mov_b32 s20, 1", MissingWait, "s20"),
        ("s_load_dword s20, s[4:5], 0x100\ns_waitcnt lgkmcnt(0)", OutOfBounds, "source"),
        ("v_mov_b32_e32 v2, 0\nglobal_store_dword v2, v0, s[6:7]", DataRace, "two lanes"),
    ],
)
def test_memory_error(body, error, match):
    with pytest.raises(error, match=match) as info:
        launch(body, np.arange(64, dtype=np.uint32))
    assert "k, line" in info.value.where


def test_masked_load_defines_only_its_lanes():
    body = """
	s_mov_b64 exec, 0xf
	global_load_dword v20, v1, s[4:5]
	s_waitcnt vmcnt(0)
	v_add_u32_e32 v32, 1, v20
	{restore}
	v_add_u32_e32 v32, 1, v20
	global_store_dword v1, v32, s[6:7]"""
    result = launch(body.format(restore="s_nop 0"), np.arange(64, dtype=np.uint32), 4)
    assert result.tolist() == [1, 2, 3, 4]
    with pytest.raises(UndefinedRead, match="lane 4"):
        launch(body.format(restore="s_mov_b64 exec, -1"), np.arange(64, dtype=np.uint32))


def test_waits_retire_in_order():
    """vmcnt(1) makes the older of two loads usable, not the younger (CDNA3 ISA 4.4)."""
    loads = "global_load_dword v20, v1, s[4:5]\nglobal_load_dword v21, v1, s[4:5]\ns_waitcnt vmcnt(1)\n"
    data = np.arange(64, dtype=np.uint32)
    launch(loads + "v_mov_b32_e32 v32, v20\n s_waitcnt vmcnt(0)", data)
    with pytest.raises(MissingWait):
        launch(loads + "v_add_u32_e32 v32, 1, v21", data)
    smem = "s_load_dword s20, s[4:5], 0x0\ns_load_dword s21, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s22, s20"
    with pytest.raises(MissingWait):  # scalar loads return in any order
        launch(smem, data)


def test_scalar_loads():
    body = """
	s_load_dwordx4 s[20:23], s[4:5], 0x10
	s_movk_i32 s24, 0x20
	s_load_dword s25, s[4:5], s24 offset:0x4
	s_waitcnt lgkmcnt(0)
	s_add_u32 s20, s20, s23
	s_add_u32 s20, s20, s25
	v_mov_b32_e32 v32, s20
	global_store_dword v1, v32, s[6:7]"""
    result = launch(body, np.arange(64, dtype=np.uint32))
    assert (result == 4 + 7 + 9).all()


# -- buffers --------------------------------------------------------------------------------------------------------
def resource(records: int, base: str = "s[4:5]", at: int = 20, stride: int = 0) -> str:
    low, high = base.strip("s[]").split(":")
    return f"""
	s_mov_b32 s{at}, s{low}
	s_or_b32 s{at + 1}, s{high}, {stride << 16:#x}
	s_mov_b32 s{at + 2}, {records:#x}
	s_mov_b32 s{at + 3}, 0x27000
"""


def test_buffer_load_out_of_range_gives_zero():
    body = resource(100) + "buffer_load_dword v32, v1, s[20:23], 0 offen offset:4\ns_waitcnt vmcnt(0)\n"
    result = launch(body + "global_store_dword v1, v32, s[6:7]", np.arange(1, 65, dtype=np.uint32))
    assert (result == np.where(LANES + 1 < 25, LANES + 2, 0)).all()


def test_range_check_is_per_word():
    body = "v_lshlrev_b32_e32 v2, 4, v0\n" + resource(64 * 16 - 8)
    body += "buffer_load_dwordx4 v[32:35], v2, s[20:23], 0 offen\ns_waitcnt vmcnt(0)\n"
    body += "global_store_dwordx4 v2, v[32:35], s[6:7]"
    data = np.arange(1, 257, dtype=np.uint32)
    result = launch(body, data, 256)
    assert (result == np.where(np.arange(256) < 254, data, 0)).all()


@pytest.mark.parametrize("load", ["buffer_load_dword v1, v1, s[20:23], 0 offen", "global_load_dword v1, v1, s[4:5]"])
def test_load_into_its_own_address_register(load):
    body = resource(256) + f"v_mov_b32_e32 v5, v1\n{load}\ns_waitcnt vmcnt(0)\nglobal_store_dword v5, v1, s[6:7]"
    result = launch(body, np.arange(64, dtype=np.uint32))
    assert (result == LANES).all()


def test_buffer_store_out_of_range_is_dropped():
    body = resource(40, "s[6:7]") + "buffer_store_dword v0, v1, s[20:23], 0 offen"
    result = launch(body, np.zeros(4, np.uint32), 10)
    assert (result == LANES[:10]).all()


def test_range_check_that_depends_on_the_scalar_offset_is_an_error():
    body = resource(256) + "s_movk_i32 s30, 0x80\nbuffer_load_dword v32, v1, s[20:23], s30 offen\ns_waitcnt vmcnt(0)"
    with pytest.raises(OutOfBounds, match="scalar offset"):
        launch(body, np.arange(96, dtype=np.uint32))
    with pytest.raises(OutOfBounds, match="straddles"):
        launch(resource(254) + "buffer_load_dword v32, v1, s[20:23], 0 offen", np.arange(64, dtype=np.uint32))
    with pytest.raises(UnknownInstruction, match="swizzled"):
        launch(resource(256, stride=0x8000) + "buffer_load_dword v32, v1, s[20:23], 0 offen", np.zeros(64, np.uint32))


def test_range_check_does_not_hide_a_wrong_resource():
    """In range of the resource, but the buffer behind it is shorter."""
    with pytest.raises(OutOfBounds):
        launch(resource(1000) + "buffer_load_dword v32, v1, s[20:23], 0 offen", np.arange(60, dtype=np.uint32))


# -- between workgroups ---------------------------------------------------------------------------------------------
def test_two_workgroups_must_not_store_the_same_bytes():
    body = "v_mov_b32_e32 v32, 1\nglobal_store_dword v1, v32, s[6:7]"
    for rows in (1, 256):  # one workgroup after the other, and both in one batch
        with pytest.raises(DataRace, match="two workgroups"):
            launch(body, np.zeros(1, np.uint32), grid=2, rows=rows)
    assert (launch(body, np.zeros(1, np.uint32), grid=2, redundant_writes=True) == 1).all()
    body = "v_mov_b32_e32 v32, s2\nglobal_store_dword v1, v32, s[6:7]"
    for rows in (1, 256):
        with pytest.raises(DataRace):
            launch(body, np.zeros(1, np.uint32), grid=2, rows=rows, redundant_writes=True)
    body = "s_lshl_b32 s3, s2, 8\nv_add_u32_e32 v2, s3, v1\nglobal_store_dword v2, v0, s[6:7]"
    result = launch(body, np.zeros(1, np.uint32), 192, grid=3)
    assert (result == np.tile(LANES, 3)).all()


@pytest.mark.parametrize("rows", [1, 256])
def test_a_workgroup_must_not_load_another_ones_store(rows):
    body = """
	v_lshl_add_u32 v2, s2, 8, v1
	global_store_dword v2, v0, s[6:7]
	s_waitcnt vmcnt(0)
	v_xor_b32_e32 v2, 0x100, v2
	global_load_dword v3, v2, s[6:7]
	s_waitcnt vmcnt(0)"""
    with pytest.raises(DataRace, match="another workgroup"):
        launch(body, np.zeros(1, np.uint32), grid=2, rows=rows, result=np.zeros(128, np.uint32))


# -- the host's side ------------------------------------------------------------------------------------------------
def test_result_that_was_not_written_cannot_be_read():
    memory = Memory()
    out = memory.empty((4,), np.float32, "out")
    with pytest.raises(UndefinedRead, match="out: 16 bytes"):
        memory.read(out)
    assert memory.read(out, unwritten=0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("grid", "block", "arguments", "match"),
    [
        ((1, 1, 1), (64, 1, 1), [], "0 arguments"),
        ((1, 1, 1), (2048, 1, 1), [1, 2], "2048 threads"),
        ((1, 1, 1), (64, 1, 1), [b"abc", 2], "3 bytes"),
    ],
)
def test_bad_launch(grid, block, arguments, match):
    with pytest.raises(MachineError, match=match):
        Gfx942Device(Memory()).launch(kernel(""), grid, block, arguments)


def test_partial_last_wave_has_inactive_lanes():
    body = "global_store_dword v1, v0, s[6:7]"
    result = launch(body, np.zeros(1, np.uint32), 100, threads=100)
    assert (result == np.arange(100)).all()
