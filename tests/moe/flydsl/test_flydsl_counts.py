"""The counts that make the kernels fast, held as bounds: a change that loses one of them fails here, not on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.extent import LONG, extent
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.machine.hardware import gpu_by_name
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from proof import kernel_counts as counts
from proof.account.blocks import expected_blocks
from proof.kernels import app, count_kernels

KIMI = {tp: MoeShape(384, 7168, 2048 // tp, 8) for tp in extent((8,), (4, 8))}

# The published kernels on the same shapes (TP 8): waves a SIMD, most weight bytes in flight a wave, and the vector
# unit's clocks a wave with multiplies at quarter rate.
PUBLISHED = {
    "stage1 m16 n64": (4, 4096, 25268),
    "stage2 m16 n256": (5, 7168, 3 * 2628 / 2),  # six waves there, which do not quantize: ours takes less than half
    "stage1 m64 n128": (4, 1024, 52556),
    "stage2 m64 n1024": (2, 6656, 3 * 4 * 4372 / 2),  # of 256 channels, ours of 1024, and both ways to its rows
}


@pytest.fixture(scope="module")
def rows() -> dict[str, counts.Figures]:
    found: dict[str, counts.Figures] = {}
    for tp in KIMI:
        for tokens in (2, 8, 40, 160, 10240):
            found.update(count_kernels(KIMI[tp], tokens, f"tp{tp}"))
    return found


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.skipif(find_spec("flydsl") is None, reason="flydsl is not installed (extra `kernels`)")
class TestCompiled:
    def test_unpacking_costs_two_operations_and_no_multiply(self, rows: dict[str, counts.Figures]) -> None:
        stages = {name: row for name, row in rows.items() if " stage" in name}
        assert len(stages) == 8 * len(KIMI)
        for name, row in stages.items():
            addresses = int(" stage2 m16 " in name)  # of the rows that it quantizes behind its first weight loads
            others = 0.2 if " stage2 n" in name else 0  # of the low sum, which the count takes for the weights'
            assert 2.0 <= row["unpack_per_8"] <= 2.0 + others and row["hot_multiplies"] <= addresses, name

    def test_the_vector_unit_never_bounds_the_hot_loop(self, rows: dict[str, counts.Figures]) -> None:
        for name, row in rows.items():
            if " stage" in name:
                quantizes, few = " stage2 m16 " in name, " m4 " in name or " stage2 n" in name
                assert row["hot_ratio"] <= (1.75 if quantizes else 1.2 if few else 0.75 if " m16 " in name else 0.6), (
                    name
                )
            if " stage2 m16 " in name:  # the vector unit is busy for less than half of the time that weights take
                least = counts.floors(gpu_by_name("mi325x"), KIMI[int(name[2])], 160, 2, (16, 256), row)
                assert least.simd_us < least.weights_us / 2

    def test_enough_weights_are_in_flight(self, rows: dict[str, counts.Figures]) -> None:
        for name, row in rows.items():
            if " stage" in name:
                decode = " m16 " in name or " m4 " in name or " stage2 n" in name
                assert row["weight_bytes_in_flight"] >= (8192 if decode else 4096), name
            if " stage1" in name:
                assert row["exposed_waits"] == 0, name

    def test_nothing_spills(self, rows: dict[str, counts.Figures]) -> None:
        assert all(row["spilled_bytes"] == 0 for row in rows.values())

    @pytest.mark.parametrize("kernel", PUBLISHED)
    def test_better_than_published(self, rows: dict[str, counts.Figures], kernel: str) -> None:
        waves, in_flight, valu_clocks = PUBLISHED[kernel]
        row = next(row for name, row in rows.items() if name.startswith(f"tp8 {kernel} "))
        assert row["valu_clocks"] < valu_clocks / 3
        assert row["waves_per_simd"] * row["weight_bytes_in_flight"] > waves * in_flight

    def test_no_figure_got_worse(self, rows: dict[str, counts.Figures]) -> None:
        """After a deliberate change: python -m proof.kernels --save proof/kernel_counts.json"""
        saved = {name: row for name, row in counts.read_figures(counts.BASELINE).items() if "mxfp4" not in name}
        kept = {name: row for name, row in saved.items() if LONG or name.startswith("tp8 ")}
        assert counts.regressions(rows, kept) == []

    @pytest.mark.slow
    def test_no_figure_of_mxfp4_got_worse(self) -> None:
        """After a deliberate change: python -m proof.kernels --weights mxfp4 --save proof/kernel_counts.json"""
        shape = replace(KIMI[8], weights=MXFP4)
        found = count_kernels(shape, 8, "tp8") | (count_kernels(shape, 10240, "tp8") if LONG else {})
        saved = {name: row for name, row in counts.read_figures(counts.BASELINE).items() if name in found}
        assert set(saved) == set(found) and counts.regressions(found, saved) == []

    def test_the_command_names_what_got_worse(self, rows: dict[str, counts.Figures], tmp_path: Path) -> None:
        saved = {name: {**row, "vgprs": 0.0} for name, row in rows.items()}  # not a figure that is held
        counts.write_figures(saved, tmp_path / "same.json")
        runner, wanted = CliRunner(), ["--tp", "8", "--tokens", "8", "--compare"]
        assert runner.invoke(app, [*wanted, str(tmp_path / "same.json")]).exit_code == 0
        saved["tp8 stage1 m4 n32 k256"]["weight_bytes_in_flight"] = 9999.0
        counts.write_figures(saved, tmp_path / "better.json")
        result = runner.invoke(app, [*wanted, str(tmp_path / "better.json")])
        assert "tp8 stage1 m4 n32 k256: weight_bytes_in_flight 9999 -> 8192" in str(result.exception)


def figures(**changes: float) -> counts.Figures:
    row = dict.fromkeys((*counts.COSTS, *counts.GAINS), 4.0)
    return {**row, **changes}


def test_regressions_name_the_figure_and_a_missing_kernel() -> None:
    now = {"k": figures(exposed_waits=5), "l": figures(waves_per_simd=3), "m": figures(mfma=3, waves_per_simd=5)}
    found = counts.regressions(now | {"new": figures()}, {name: figures() for name in "klmn"})
    assert found == ["k: exposed_waits 4 -> 5", "l: waves_per_simd 4 -> 3", "n: no longer compiled"]


def test_saved_figures_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    counts.write_figures({"a": figures(), "b": figures(mfma=1)}, path)
    assert counts.read_figures(path) == {"a": figures(), "b": figures(mfma=1)}
    path.write_text("[1]")
    with pytest.raises(KimiError, match="cannot be read"):
        counts.read_figures(path)


@pytest.mark.parametrize("tokens,experts,blocks", [(2, 15.8, 15.8), (8, 59.5, 59.5), (160, 370.8, 370.8)])
def test_expected_experts_and_blocks(tokens: int, experts: float, blocks: float) -> None:
    found = expected_blocks(KIMI[8], tokens, 16)
    assert found == (pytest.approx(experts, abs=0.1), pytest.approx(blocks, abs=0.1))


def test_blocks_of_a_prefill() -> None:
    """Binomial and, past the range of floats, its normal approximation agree."""
    exact = expected_blocks(KIMI[8], 10240, 64)
    assert exact == (pytest.approx(384), pytest.approx(1508.7, abs=1))
    assert expected_blocks(KIMI[8], 40000, 64)[1] == pytest.approx(40000 * 8 / 64 + 192, rel=1e-3)


def test_floors_of_a_decode_batch() -> None:
    wave = {"waves": 4.0, "simd_clocks": 7168.0}
    floor = counts.floors(gpu_by_name("mi325x"), KIMI[8], 8, 1, (16, 64), wave)
    assert floor.weights_us == pytest.approx(18.2, abs=0.1)
    assert floor.padded_mfma_us == pytest.approx(2.7, abs=0.1)
    assert floor.simd_us == pytest.approx(floor.padded_mfma_us, rel=0.05)  # 448 MFMA of 16 clocks are 7168 clocks


def test_rare_blocks_and_what_only_they_reach_do_not_count() -> None:
    """The branch back stays, and the branches forward, which a full block does not take, go."""
    code = """k:
    .LBB0_1:
        s_cbranch_vccz .LBB0_4
        v_add_u32_e32 v1, v1, v1
        ; rare
        s_cbranch_scc1 .LBB0_3
        v_add_u32_e32 v2, v2, v2
    .LBB0_3:
        s_branch .LBB0_6
    .LBB0_4:
        v_mfma_i32_16x16x32_i8 v[4:7], v[0:1], v[2:3], v[4:7]
        s_cbranch_scc1 .LBB0_5
        v_mfma_i32_16x16x32_i8 v[8:11], v[0:1], v[2:3], v[8:11]
        s_branch .LBB0_6
    .LBB0_5:
        v_mov_b32_e32 v8, v12
    .LBB0_6:
        v_xor_b32_e32 v0, v0, v1
        s_cbranch_scc1 .LBB0_1
        s_endpgm""".replace("\n    ", "\n")
    kept = [line.split()[0] for line in counts.common_path(code).splitlines()]
    assert kept == ["k:", ".LBB0_1:", *["v_mfma_i32_16x16x32_i8"] * 2, "v_xor_b32_e32", "s_cbranch_scc1", "s_endpgm"]
