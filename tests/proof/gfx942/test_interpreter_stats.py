"""Static counts on small kernels whose figures can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreter_asm import kernel

from proof.gfx942.costs import load_bytes, mfma_clocks, valu_clocks
from proof.gfx942.stats import analyse, occupancy

# Activations s[8:11] pass through LDS, weights s[12:15] are unpacked with three operations per word.
LOOP = Path(__file__).with_name("counted.s").read_text()


def test_rolled_loop():
    stats = analyse(kernel(LOOP), trips=10)
    assert stats.hot_is_loop and stats.hot.counts.total() == 19 and stats.hot.mfma == 2
    assert stats.hot.valu == 7 and stats.hot.kinds["multiply"] == 1
    assert stats.hot.valu_clocks(True) == 6 * 4 + 16 and stats.hot.valu_clocks(False) == 7 * 4
    assert stats.hot.mfma_clocks == 32 and stats.hot.ratio(False) == 28 / 32
    assert stats.hot.simd_bound(True) == 40 + 8
    assert stats.flow.group == "s[12:15]" and stats.flow.staged_groups == ("s[8:11]",)
    assert stats.flow.bytes == 1024 and stats.flow.words == 4
    assert stats.flow.unpack == {"v_and_b32": 4, "v_lshlrev_b32": 2} and stats.flow.unpack_per_word == 1.5
    assert stats.flight.maximum == 1024
    assert stats.flight.exposed_waits == 2
    assert stats.whole.mfma == 21 and stats.whole.counts["s_barrier"] == 10
    assert stats.whole.kinds["transcendental"] == 1 and stats.whole.kinds["conversion"] == 1


def test_straight_line_kernel_is_cut_from_first_weight_load_to_last_mfma():
    body = LOOP.replace("	s_cbranch_scc1 .Lloop\n", "").replace(".Lloop:\n", "")
    stats = analyse(kernel(body))
    assert not stats.hot_is_loop
    assert stats.hot.mfma == 3 and stats.hot.kinds["transcendental"] == 1
    assert stats.whole.counts.total() == stats.hot.counts.total() + 2  # the first move and s_endpgm


@pytest.mark.parametrize(
    ("registers", "lds", "threads", "expected"),
    [
        (64, 0, 256, (8, 8)),
        (65, 0, 256, (7, 7)),
        (128, 0, 256, (4, 4)),
        (512, 0, 256, (1, 1)),
        (64, 32768, 256, (2, 2)),
        (64, 32769, 256, (1, 1)),
        (128, 0, 1024, (4, 1)),
    ],
)
def test_occupancy(registers, lds, threads, expected):
    """512 vector registers per SIMD lane in granules of 8, at most 8 waves, 64 KiB of LDS per compute unit."""
    assert occupancy(registers, lds, threads) == expected


@pytest.mark.parametrize(
    ("opcode", "clocks"),
    [
        ("v_mfma_i32_16x16x32_i8", 16),
        ("v_mfma_i32_32x32x16_i8", 32),
        ("v_mfma_f32_16x16x16_bf16", 16),
        ("v_mfma_f32_32x32x8_bf16", 32),
        ("v_mfma_f32_16x16x4_f32", 32),
        ("v_mfma_f32_32x32x2_f32", 64),
        ("v_mfma_f32_16x16x8_xf32", 16),
        ("v_mfma_f64_16x16x4_f64", 32),
    ],
)
def test_matrix_clocks(opcode, clocks):
    assert mfma_clocks(opcode) == clocks


def test_int8_matrix_clocks_give_the_peak_of_the_data_sheet():
    """MI325X: 304 compute units, 4 SIMDs, 2.1 GHz, 2614.9 INT8 TOPS."""
    peak = 2 * 16 * 16 * 32 / mfma_clocks("v_mfma_i32_16x16x32_i8") * 4 * 304 * 2.1e9
    assert round(peak / 1e12, 1) == 2614.9


def test_instruction_costs():
    assert valu_clocks("v_mul_lo_u32", True) == 16 and valu_clocks("v_mul_lo_u32", False) == 4
    assert valu_clocks("v_rcp_iflag_f32", False) == 16 and valu_clocks("v_perm_b32", True) == 4
    widths = {"buffer_load_dwordx4": 16, "global_load_ubyte_d16_hi": 1, "global_load_lds_dword": 4, "v_mov_b32": 0}
    widths |= {"global_store_short": 0, "buffer_atomic_add_x2": 0, "ds_read_u16_d16": 0}
    assert {op: load_bytes(op) for op in widths} == widths


def test_registers_of_both_files():
    stats = analyse(kernel(LOOP + "\n	v_accvgpr_read_b32 v50, a6", agprs=8))
    assert (stats.vgprs, stats.agprs) == (51, 7) and stats.whole.kinds["accumulator move"] == 1
