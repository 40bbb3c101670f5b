"""`kimi-w4a8 warm` against what the servers of the recipes launch; nothing is compiled here.

Forwards run the backend's own launch code on meta tensors, with the launches recorded instead of made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.gates import read_gates
from kimi_w4a8_eagle3.moe.contract import MoeShape, PreparedMoe
from kimi_w4a8_eagle3.moe.flydsl import layout
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import Stage1Config
from kimi_w4a8_eagle3.moe.flydsl.kernels import warm as flydsl_warm
from kimi_w4a8_eagle3.moe.flydsl.objects import KernelManifest, source_hash
from kimi_w4a8_eagle3.quark.weight_format import MXFP4
from kimi_w4a8_eagle3.recipe.launch import load_recipe

pytestmark = pytest.mark.kernels

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


def gates_of(recipe: str, more: Mapping[str, str] = MappingProxyType({})) -> Any:
    return read_gates({**os.environ, **more, **load_recipe(recipe).environment})


def launched(gates: Any, batches: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    found: set[Any] = set()
    monkeypatch.setattr(FlydslBackend, "launch", lambda self, config, *args: found.add(config))
    backend = FlydslBackend(gates)
    for tokens in batches:
        backend.forward(*meta_batch(tokens))
    return found


def meta_batch(tokens: int) -> tuple[torch.Tensor, PreparedMoe, torch.Tensor, torch.Tensor]:
    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    moe = PreparedMoe(
        KIMI, layout.name(KIMI.weights), meta(1), meta(1), meta(1), meta(1)
    )  # launches only pass the weights on
    x = meta(tokens, KIMI.hidden, dtype=torch.bfloat16)
    return x, moe, meta(tokens, KIMI.top_k), meta(tokens, KIMI.top_k, dtype=torch.int32)


def warmed(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[list[Any], str]:
    """(what would be compiled, in order; what the command says)."""
    found: list[Any] = []

    def record(configs: Iterable[Any], folder: Path, jobs: int, watch: Any) -> tuple[Any, int]:
        found.extend(dict.fromkeys(configs))
        return KernelManifest.model_construct(arch="gfx942", sources=source_hash(), kernels={}), len(found)

    monkeypatch.setattr(flydsl_warm, "warm", record)
    result = CliRunner().invoke(app, ["warm", *options], catch_exceptions=False)
    assert result.exit_code == 0
    return found, result.output


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_warm_compiles_what_the_server_launches(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = gates_of(case.split(",")[0], ENVIRONMENTS[case])
    wanted, (everything, output) = FlydslBackend(gates).wanted(KIMI), warmed(monkeypatch)
    assert launched(gates, SERVED, monkeypatch) <= set(wanted) <= set(everything)
    assert launched(gates, ALL, monkeypatch) == set(wanted)  # and nothing that no batch asks for
    assert f"flydsl: {len(everything)} kernels" in output


def test_kernels_without_gates_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = warmed(monkeypatch)
    serves = [FlydslBackend().wanted(replace(KIMI, inter=inter)) for inter in (256, 512)]
    first = list(dict.fromkeys([*serves[0], *serves[1]]))
    assert found[: len(first)] == first and len(found) > 150


def test_another_checkpoint_is_warmed_by_its_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {"n_routed_experts": 8, "hidden_size": 1024, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = warmed(monkeypatch, "--model", str(tmp_path), "--tp", "2")
    assert set(FlydslBackend().wanted(MoeShape(8, 1024, 256, 4, weights=MXFP4))) <= set(found)
    assert {config.hidden for config in found if isinstance(config, Stage1Config)} == {1024}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["--recipe", "agent-mxfp4"], replace(KIMI, weights=MXFP4)),
        (["--tp", "4"], replace(KIMI, inter=512)),
        (["--tp", "8", "--ep", "8"], MoeShape(48, 7168, 2048, 8)),
    ],
    ids=["mxfp4", "tp 4", "ep 8"],
)
def test_a_recipe_and_expert_parallel_ranks_are_warmed(
    options: list[str], shape: MoeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = warmed(monkeypatch, *options)
    assert set(FlydslBackend().wanted(shape)) <= set(found)
    assert {config.inter for config in found if isinstance(config, Stage1Config)} == {shape.inter}


def test_recipes_differ_in_what_they_launch() -> None:
    usual, opt, bf16 = (set(FlydslBackend(gates_of(name)).wanted(KIMI)) for name in ("w4a8", "eagle3-opt", "w4a16"))
    unpinned = {c.tile_m for c in opt - usual}
    assert unpinned == {4, 16, 32} and all(not c.pinned for c in opt - usual)
    assert {type(c).__name__ for c in bf16} == {"W4A16Config", "ReduceConfig", "RouteConfig"}


def test_a_batch_beyond_the_buffers_is_refused() -> None:
    with pytest.raises(KimiError, match="exceed the kernels' 4 GiB"):
        FlydslBackend().forward(*meta_batch(1 << 18))
