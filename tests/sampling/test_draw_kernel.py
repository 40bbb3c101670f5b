"""The Triton kernels of `sampling`, compiled for gfx942; tests/moe/triton executes draw_interpreted.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.sampling import triton_draw, triton_finite, triton_penalties
from proof.triton_compile import offline_driver, target_of

KIMI_VOCABULARY = 163_840

pytestmark = pytest.mark.kernels


def without_spills(compiled: Any) -> str:
    """Return the machine code of a kernel that keeps all values in registers."""
    code: str = compiled.asm["amdgcn"]
    assert set(re.findall(r"(?:vgpr|sgpr)_spill_count:\s+(\d+)", code)) == {"0"}
    assert re.findall(r"ScratchSize: (\d+)", code) == ["0"]
    assert compiled.metadata.num_warps * 64 <= 1024  # threads of a workgroup of gfx942
    return code


@pytest.mark.parametrize("filters", [False, True], ids=["plain", "filters"])
def test_it_compiles_for_gfx942_without_spills(filters: bool) -> None:
    meta = torch.device("meta")
    floats, ints = torch.empty(160, device=meta), torch.empty(160, dtype=torch.int64, device=meta)
    with offline_driver(target_of("gfx942")):
        compiled = triton_draw.draw_kernel.warmup(
            torch.empty(160, KIMI_VOCABULARY, device=meta), ints.int(), floats, floats, ints, ints, ints,
            KIMI_VOCABULARY, KIMI_VOCABULARY, FILTER=filters, BLOCK=triton_draw.BLOCK,
            RACE_BLOCK=triton_draw.RACE_BLOCK, num_warps=triton_draw.WARPS, grid=(160,),
        )  # fmt: skip
    assert "buffer_load_dwordx4" in without_spills(compiled)  # four probabilities a lane and load


def test_the_penalties_compile_for_gfx942_without_spills() -> None:
    meta = torch.device("meta")
    ints, size = torch.empty(40, dtype=torch.int64, device=meta), KIMI_VOCABULARY
    with offline_driver(target_of("gfx942")):
        compiled = triton_penalties.penalize_kernel.warmup(
            torch.empty(160, size, device=meta), ints, torch.empty(48, size, dtype=torch.int32, device=meta), ints,
            torch.empty(40, 3, device=meta), ints, size, size, N=4, BLOCK=triton_penalties.BLOCK,
            num_warps=triton_penalties.WARPS, enable_fp_fusion=False, grid=(40, 4, 40),
        )  # fmt: skip
    assert "load_dwordx4" in without_spills(compiled)  # four logits a lane and load


def test_finite_logits_compile_for_gfx942_without_spills() -> None:
    meta = torch.device("meta")
    with offline_driver(target_of("gfx942")):
        compiled = triton_finite.finite_kernel.warmup(
            torch.empty(160, KIMI_VOCABULARY, device=meta), torch.empty(160, dtype=torch.int32, device=meta),
            torch.empty(1, dtype=torch.int64, device=meta), KIMI_VOCABULARY, KIMI_VOCABULARY, 7,
            BLOCK=triton_finite.BLOCK, num_warps=triton_finite.WARPS, grid=(160, 20),
        )  # fmt: skip
    assert "load_dwordx4" in without_spills(compiled)
