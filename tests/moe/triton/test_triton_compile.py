"""The Triton kernels compiled for gfx942 and sm_90 at the real shapes: matrix instructions, no spills, store widths."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from support.extent import extent

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from proof.triton_compile import Compiled, compile_moe, target_of

TP8 = MoeShape(num_experts=384, hidden=7168, inter=256, top_k=8)
TP4 = MoeShape(num_experts=384, hidden=7168, inter=512, top_k=8)
TOKENS = [1, 8, 160, 600, 10240]  # one batch for every row of the tile table
KERNELS = {"quantize_and_route", "stage1", "quantize_act", "stage2", "reduce_slots"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@pytest.mark.parametrize(
    ("shape", "tokens"), [(TP8, TOKENS), (replace(TP8, weights=MXFP4), [10240]), *extent([], [(TP4, TOKENS)])], ids=str
)
def test_gfx942_uses_int8_mfma_without_spills(shape: MoeShape, tokens: list[int]) -> None:
    compiled = compile_moe(shape, "gfx942", tokens)
    assert {kernel.name for kernel in compiled} == KERNELS
    for kernel in compiled:
        code = kernel.kernel.asm["amdgcn"]
        spills = re.findall(r"(?:vgpr|sgpr)_spill_count:\s+(\d+)", code)
        assert spills and set(spills) == {"0"}, kernel
        assert re.findall(r"ScratchSize: (\d+)", code) == ["0"], kernel
        mfma = re.findall(r"v_mfma_\w+", code)
        assert bool(mfma) == _has_dot(kernel), kernel
        assert all(re.fullmatch(r"v_mfma_i32_\w+_i8", name) for name in mfma)
        if kernel.name == "stage2":
            assert "buffer_store_dwordx4" in code and "buffer_store_short" not in code


@pytest.mark.parametrize(("shape", "tokens"), extent([(TP8, [8, 10240])], [(TP8, TOKENS), (TP4, TOKENS)]), ids=str)
def test_sm_90_uses_int8_wgmma_without_spills(shape: MoeShape, tokens: list[int], tmp_path: Path) -> None:
    for kernel in compile_moe(shape, "sm_90", tokens):
        code = kernel.kernel.asm["ptx"]
        # A block of fewer than 64 columns cannot feed wgmma (64 rows of weights) and takes mma.
        wanted = "wgmma.mma_async" if kernel.constants.get("BN", 0) >= 64 else "mma.sync"
        found = re.findall(r"((?:wgmma\.mma_async|mma\.sync)\S*)", code)
        assert bool(found) == _has_dot(kernel), kernel
        assert all(name.startswith(wanted) and ".s32.s8.s8" in name for name in found), kernel
        assert _stack_bytes(kernel, tmp_path) == 0, kernel


def test_the_unpack_is_three_operations_for_eight_weights() -> None:
    """On NVIDIA; a shift and two ands in the PTX for every 32-bit word."""
    stage2 = next(kernel for kernel in compile_moe(TP8, "sm_90", [8]) if kernel.name == "stage2")
    code = stage2.kernel.asm["ptx"]
    words = stage2.constants["BN"] * 128 // 4 // (32 * stage2.constants["num_warps"])  # a thread's, in one K step
    assert len(re.findall(r"and\.b32 \S+, \S+, 0xF0F0F0F0", code)) == 2 * words


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(KimiError, match="tpu"):
        target_of("tpu")


def _has_dot(kernel: Compiled) -> bool:
    return kernel.name in ("stage1", "stage2")


def _stack_bytes(kernel: Compiled, folder: Path) -> int:
    """Local memory of a kernel's machine code: what ptxas spills goes there."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.kernel.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
