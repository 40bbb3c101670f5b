"""The FlyDSL backend: tile choice, gates, refusals, linkers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.next_step import pip_install
from kimi_w4a8_eagle3.gates import tile_gate
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend, FlydslCall
from kimi_w4a8_eagle3.moe.flydsl.configs import FlydslTiles
from kimi_w4a8_eagle3.moe.flydsl.kernels import toolchain as toolchain
from kimi_w4a8_eagle3.moe.reference import ReferenceBackend
from kimi_w4a8_eagle3.moe.tiles import buckets
from kimi_w4a8_lab.kernels.random_layers import random_batch, random_layer

pytestmark = pytest.mark.kernels

KIMI = {tp: MoeShape(384, 7168, 2048 // tp, 8) for tp in (4, 8)}
SMALL = MoeShape(num_experts=6, hidden=1024, inter=256, top_k=3)


@pytest.mark.parametrize("tp", KIMI)
def test_every_row_of_the_table_has_a_kernel_for_kimi(tp: int) -> None:
    backend = FlydslBackend()
    assert backend.shape_problem(KIMI[tp]) is None
    for tokens in [*buckets("flydsl"), 1, 8, 160, 10240]:
        configs = backend.configs(KIMI[tp], tokens)
        assert tokens > 1024 or configs["stage1"].tile_k == 256  # decode's default


@pytest.mark.parametrize(
    "gates,message",
    [
        ({"AITER_FLYDSL_STAGE2_TILE_K": 64}, "tile_k 64"),
        ({"AITER_FLYDSL_STAGE1_TILE_N": 256}, r"no kernel for tile .*256"),
        ({"AITER_FLYDSL_STAGE1_TILE_M": 48}, r"no kernel for tile .*48"),
        ({"AITER_FLYDSL_STAGE1_TILE_M": 16, "AITER_FLYDSL_STAGE2_TILE_M": 64}, "use the same blocks"),
    ],
)
def test_env_tiles_that_do_not_fit_are_errors(gates: dict[str, Any], message: str) -> None:
    with pytest.raises(KimiError, match=message):
        FlydslBackend(gates).configs(KIMI[8], 8)
    with pytest.raises(KimiError, match=message):  # the automatic choice does not go on to Triton
        FlydslBackend(gates).shape_problem(KIMI[8])


def test_a_plan_is_made_once_for_all_batches_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, shape = FlydslBackend(), SMALL
    made = []
    monkeypatch.setattr(FlydslBackend, "configs_of", lambda self, shape, tiles: made.append(tiles) or {})
    assert backend.configs(shape, 17) is backend.configs(shape, 64) is not backend.configs(shape, 65)
    backend.configs(replace(shape, inter=512), 64)  # another shape has a plan of its own
    assert [tiles.stage1 for tiles in made] == [(32, 256), (64, 256), (32, 256)]


def test_few_tokens_have_kernels_of_their_own_where_they_fit() -> None:
    def names(shape: MoeShape, tokens: int, gates: dict[str, Any] | None = None) -> list[str]:
        return list(FlydslBackend(gates).configs(shape, tokens))

    every = ["route", "stage1", "stage2", "reduce"]
    for shape in KIMI.values():
        assert [names(shape, t) for t in (1, 16, 17, 64, 65)] == [every[1:3]] * 2 + [every[1:]] * 2 + [every]
    assert names(SMALL, 8) == every  # three slots a token: four waves cannot share them
    assert names(SMALL, 40) == every[1:]
    assert names(replace(SMALL, top_k=10), 40) == every  # 640 slots for 64 tokens
    assert names(KIMI[8], 8, {tile_gate(2, "N"): 128}) == every[1:]  # what only other kernels have
    assert names(KIMI[8], 8, {tile_gate(1, "N"): 64}) == names(KIMI[8], 8, {tile_gate(2, "M"): 16}) == every


def test_each_stage_has_its_own_gates() -> None:
    """Each axis of each stage, and no other, follows its gate."""
    usual = FlydslBackend().tiles_for(KIMI[4], 160)
    for stage, axis in ((1, "N"), (1, "K"), (2, "N"), (2, "K")):
        n, k = usual.stage1 if stage == 1 else usual.stage2
        expected = replace(usual, **{f"stage{stage}": (512, k) if axis == "N" else (n, 512)})
        assert FlydslBackend({tile_gate(stage, axis): 512}).tiles_for(KIMI[4], 160) == expected
    for stage in (1, 2):
        assert FlydslBackend({tile_gate(stage, "M"): 32}).tiles_for(KIMI[4], 8).tile_m == 32


@pytest.mark.parametrize(
    "shape,message",
    [
        (MoeShape(8, 7168 + 64, 256, 8), "hidden size 7232"),
        (MoeShape(8, 7168, 200, 8), "200"),
        (MoeShape(8, 7168, 2176, 8), "intermediate size 2176"),
    ],
)
def test_shapes_without_a_tile_say_why(shape: MoeShape, message: str) -> None:
    problem = FlydslBackend().shape_problem(shape)
    assert problem is not None and message in problem
    assert FlydslBackend({"AITER_FLYDSL_STAGE2_TILE_K": 64}).shape_problem(shape) is not None  # not for its gates


def test_other_devices_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a gfx942 GPU" in str(FlydslBackend().unsupported(SMALL, torch.device("cpu")))
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "9.9.9")
    with pytest.raises(KimiError, match=r"flydsl 9\.9\.9 is not supported"):
        toolchain.compilers()


def test_the_wheels_linker_comes_before_rocms_and_rocms_before_debians(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocm, debian = tmp_path / "rocm", tmp_path / "bin" / "ld.lld-19"
    for linker in (rocm / "llvm" / "bin" / "ld.lld", debian):
        linker.parent.mkdir(parents=True)
        linker.write_text("#!/bin/sh\necho $0 $*\n")
        linker.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    monkeypatch.setenv("PATH", str(debian.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def version() -> str:
        command = [toolchain.rocm_path() / "llvm" / "bin" / "ld.lld", "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    if find_spec("ziglang"):
        assert version().startswith("LLD ")
        monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert version() == f"{rocm}/llvm/bin/ld.lld --version\n"
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert version() == f"{debian} --version\n"


def test_a_missing_linker_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(KimiError, match=r"no linker.*\n.*package ziglang .* or Debian's ld.lld-19") as error:
        toolchain.rocm_path()
    assert error.value.remedy == "in a checkout of this package: " + pip_install("-e", "'.[kernels]'")


def test_the_kernels_get_contiguous_tensors() -> None:
    """They read rows of a tensor without its strides. SGLang's router may return columns of a wider tensor."""
    wide = torch.randn(4, 2, 6), torch.rand(4, 6), torch.randint(6, (4, 6))
    given = wide[0][:, 0], wide[1][:, :3], wide[2][:, ::2]
    call = FlydslCall(None, {}, given[0], None, given[1], given[2])  # type: ignore[arg-type]
    for kept, tensor in zip((call.x, call.weights, call.ids), given, strict=True):
        assert kept.is_contiguous() and torch.equal(kept, tensor)


def test_inputs_of_the_wrong_kind_are_refused() -> None:
    backend, cpu = FlydslBackend(), torch.device("cpu")
    weights, (x, router, ids) = random_layer(SMALL, cpu), random_batch(SMALL, 2, cpu)
    moe = backend.prepare(weights)
    with pytest.raises(KimiError, match="topk_ids"):
        backend.forward(x, moe, router, ids.long())
    with pytest.raises(KimiError, match="layout"):
        backend.forward(x, ReferenceBackend().prepare(weights), router, ids)


def test_a_malformed_table_row_is_an_error() -> None:
    with pytest.raises(KimiError, match="malformed"):
        FlydslTiles.from_row({"tile_m": 16, "stage1": [32]})
    row = {"tile_m": 16, "stage1": [32, 256], "stage2": [256, 256]}
    assert FlydslTiles.from_row(row).to_row() == row
