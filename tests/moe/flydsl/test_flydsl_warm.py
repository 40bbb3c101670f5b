"""`kimi warm --recipe R` against what the server started by that recipe launches; nothing is compiled here.

Forwards run the backend's own launch code on meta tensors, with the launches recorded instead of made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.gates import read_gates
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.flydsl import toolchain as toolchain
from kimi_w4a8_eagle3.recipe.launch import load_recipe

SKIP = toolchain.flydsl_problem() or toolchain.linker_problem()
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(SKIP is not None, reason=f"FlyDSL kernels: {SKIP}")]
if SKIP is None:
    pytest.importorskip("triton")
    from kimi_w4a8_eagle3.moe.flydsl import route_slots as flydsl_route
    from kimi_w4a8_eagle3.moe.flydsl import warm as flydsl_warm
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
    from kimi_w4a8_eagle3.moe.flydsl.layout import LAYOUT

KIMI = MoeShape(384, 7168, 256, 8)
SERVED = (1, 8, 160, 10240)
# Every power of two that the sorting kernel is compiled for, and both sides of each bound of the table.
ALL = sorted({*SERVED, 2, 3, 4, 5, 16, 32, 64, 65, 128, 256, 384, 385, 1024, 1025})
ENVIRONMENTS = {
    "w4a8": {},
    "eagle3-opt": {},
    "w4a16": {},
    "w4a16, block of 64": {"AITER_FLYDSL_STAGE1_TILE_M": "64"},
    "w4a8, tiles": {"AITER_FLYDSL_STAGE1_TILE_N": "64", "AITER_FLYDSL_STAGE2_TILE_M": "32"},
    "w4a8, prefill tiles": {"AITER_FLYDSL_STAGE2_TILE_M": "128", "AITER_FLYDSL_STAGE2_TILE_K": "128"},
    "w4a8, schedule": {"FLYDSL_MOE_STAGE2_SCHED": "0"},
}


class Recorder:
    """What would be compiled: FlyDSL configurations, and the constants of Triton's sorting kernel."""

    def __init__(self) -> None:
        self.found: set[Any] = set()

    def kernel(self, build: Any, config: Any, *args: Any) -> None:
        self.found.add(config)

    def route(self, *args: Any, grid: Any = None, **constants: Any) -> None:
        self.found.add(("route", *sorted(constants.items())))

    def __getitem__(self, grid: Any) -> Any:
        return self.route

    warmup = route


def launched(gates: Any, batches: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    recorder = Recorder()
    monkeypatch.setattr(flydsl_route, "_route_slots", recorder)
    monkeypatch.setattr(FlydslBackend, "launch", lambda self, *args: recorder.kernel(*args))
    backend = FlydslBackend(gates)
    for tokens in batches:
        backend.forward(*meta_batch(tokens))
    return recorder.found


class OnGpu(torch.Tensor):
    is_cuda = True  # on the meta device: shapes only, but the launch code takes a GPU's way


def meta_batch(tokens: int) -> tuple[torch.Tensor, PreparedMoe, torch.Tensor, torch.Tensor]:
    def gpu(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta").as_subclass(OnGpu)

    moe = PreparedMoe(KIMI, LAYOUT, gpu(1), gpu(1), gpu(1), gpu(1))  # launches only pass the weights on
    x = gpu(tokens, KIMI.hidden, dtype=torch.bfloat16)
    return x, moe, gpu(tokens, KIMI.top_k), gpu(tokens, KIMI.top_k, dtype=torch.int32)


def warmed(recipe: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[set[Any], str]:
    recorder = Recorder()
    monkeypatch.setattr(flydsl_route, "_route_slots", recorder)
    monkeypatch.setattr(flydsl_warm, "compile_kernel", recorder.kernel)
    command = ["warm", "--recipe", recipe, "--arch", "gfx942", "--moe-backend", "flydsl", *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    return recorder.found, result.output


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_warm_compiles_what_the_server_launches(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = case.split(",")[0]
    for name, value in ENVIRONMENTS[case].items():
        monkeypatch.setenv(name, value)
    gates = read_gates({**os.environ, **load_recipe(recipe).environment})
    found, output = warmed(recipe, monkeypatch)
    assert launched(gates, SERVED, monkeypatch) <= found
    assert launched(gates, ALL, monkeypatch) == found  # and nothing that no batch asks for
    assert f"flydsl: {len(found)} kernels" in output


def test_recipes_differ_in_what_they_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, opt, bf16 = (warmed(name, monkeypatch)[0] for name in ("w4a8", "eagle3-opt", "w4a16"))
    unpinned = {c.tile_m for c in opt - usual}
    assert unpinned == {16, 32} and all(not c.pinned for c in opt - usual)
    assert {type(c).__name__ for c in bf16 if not isinstance(c, tuple)} == {"W4A16Config", "ReduceConfig"}
    chosen, _ = warmed("w4a8", monkeypatch, "--set", "env.FLYDSL_MOE_STAGE1_SCHED=0")
    assert unpinned == {c.tile_m for c in chosen - usual}


def test_a_batch_beyond_the_buffers_is_refused() -> None:
    with pytest.raises(KimiError, match="exceed the kernels' 4 GiB"):
        FlydslBackend().forward(*meta_batch(1 << 18))


def test_warm_refuses_tiles_that_no_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_FLYDSL_STAGE1_TILE_N", "256")
    with pytest.raises(KimiError, match="no kernel for tile"):
        warmed("w4a8", monkeypatch)
