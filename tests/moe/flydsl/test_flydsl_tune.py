"""Tuning the FlyDSL backend: its candidates, the choice among given times, the command around both; no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.moe import dispatch
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
from kimi_w4a8_eagle3.moe.flydsl.configs import FlydslTiles
from kimi_w4a8_eagle3.moe.flydsl.kernels.candidates import every_kernel
from kimi_w4a8_eagle3.moe.tiles import TABLE, read_rows
from kimi_w4a8_lab.commands import tune_moe
from kimi_w4a8_lab.kernels import stopwatch
from kimi_w4a8_lab.kernels import tile_search as tune
from kimi_w4a8_lab.kernels.flydsl_tiles import flydsl_measure, flydsl_space, refuse_fixed_tiles

pytestmark = pytest.mark.kernels


class Recording(FlydslBackend):
    """Launches are recorded instead of made; `timer` turns those of one call into a time."""

    def __init__(self, gates: Any = None) -> None:
        super().__init__(gates)
        self.launched: list[Any] = []
        self.timed: list[list[Any]] = []

    def unsupported(self, shape: MoeShape, device: torch.device) -> str | None:
        return self.shape_problem(shape)

    def launch(self, config: Any, count: int, *args: Any) -> None:
        self.launched.append(config)

    def timer(self, function: Callable[[], object]) -> float | None:
        self.launched.clear()
        function()
        self.timed.append(list(self.launched))
        return cost(self.launched)


KIMI = {tp: MoeShape(384, 7168, 2048 // tp, 8) for tp in (4, 8)}
SMALL = MoeShape(num_experts=6, hidden=1024, inter=256, top_k=3)
CPU = torch.device("cpu")


def cost(launched: list[Any]) -> float | None:
    """One known best: 32 rows, stage 1 of 64 x 128, stage 2 of 512 x 128; 128 columns of stage 2 do not run."""
    best = {"Stage1Config": (64, 128), "Stage2Config": (512, 128)}
    config = next((c for c in launched if type(c).__name__ in best), None)
    if config is None:
        return 99.0  # a stage 2 by token
    n, k = best[type(config).__name__]
    if type(config).__name__ == "Stage2Config" and config.tile_n == 128:
        return None
    return 1.0 + abs(config.tile_m - 32) + abs(config.tile_n - n) + abs(config.tile_k - k)


@pytest.mark.parametrize("tp", KIMI)
@pytest.mark.parametrize("tile_m", tune.BLOCK_SIZES)
def test_the_backend_accepts_every_candidate_once(tp: int, tile_m: int, tmp_path: Path) -> None:
    shape = KIMI[tp]
    space = flydsl_space(shape)
    stage1, stage2 = space.stage1(tile_m), space.stage2(tile_m)
    everything = set(every_kernel(shape))  # what `kimi-w4a8 warm` compiles
    assert len(set(stage1)) == len(stage1) > 0 and len(set(stage2)) == len(stage2) > 3
    for number in range(max(len(stage1), len(stage2))):
        first, second = stage1[number % len(stage1)], stage2[number % len(stage2)]
        tiles = space.join(tile_m, first, second)
        assert isinstance(tiles, FlydslTiles)
        kernels = FlydslBackend().configs_of(shape, tiles)  # an error for a tile without a kernel
        assert set(kernels.values()) <= everything
        best = tune.Best(8, tiles, 1.0, 1.0)
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(tune.table_rows([best], "flydsl", shape, "gfx942", "a test")))
        assert FlydslBackend(table=path).tiles_for(shape, 8) == tiles


def test_candidates_contain_the_table() -> None:
    """The rows that the table has by count are among those that would be measured."""
    space = flydsl_space(KIMI[8])
    for row in read_rows():
        if row["backend"] == "flydsl":
            tiles = FlydslTiles.from_row(row["tiles"])
            if tiles in space.variants(tiles, row["max_tokens"] or 1024):
                continue
            assert tiles.stage1 in space.stage1(tiles.tile_m) and tiles.stage2 in space.stage2(tiles.tile_m)
            assert space.join(tiles.tile_m, tiles.stage1, tiles.stage2) == tiles


def test_each_stage_is_timed_with_its_own_launches() -> None:
    backend = Recording()
    measure = flydsl_measure(SMALL, backend, CPU, backend.timer)
    measure(FlydslTiles(16, (32, 256), (256, 256)), 5)
    measure(FlydslTiles(64, (128, 128), (1024, 256)), 5)
    names = [[type(config).__name__ for config in call] for call in backend.timed]
    assert names[:2] == [["RouteConfig", "Stage1Config"], ["Stage2Config", "ReduceConfig"]]
    assert names[2:4] == [["RouteConfig", "Stage1Config"], ["Stage2Config", "ReduceConfig"]]
    measure = flydsl_measure(replace(SMALL, top_k=4), backend, CPU, backend.timer)
    measure(FlydslTiles(4, (32, 256), (256, 256), by_token=True), 5)
    assert [[type(config).__name__ for config in call] for call in backend.timed[4:]] == [
        ["Stage1Config"],
        ["ByTokenConfig"],
    ]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is pretended: architecture, name, tensors in memory, launches, times. The rest is the command's."""
    backends: list[Recording] = []

    def load(name: str, gates: Any) -> Recording:
        backends.append(Recording(gates))
        return backends[-1]

    for module in (dispatch, tune_moe):
        monkeypatch.setattr(module, "gpu_arch", lambda device: "gfx942")
    monkeypatch.setattr(dispatch, "load_backend", load)
    monkeypatch.setattr(torch, "device", lambda name: CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI325X")
    monkeypatch.setattr(stopwatch, "gpu_timer", lambda function: backends[-1].timer(function))


SIZES = {"hidden": 1024, "inter": 256, "tp": 1, "experts": 6, "top-k": 3}
COMMAND = ["tune-moe", *(f"--{name}={size}" for name, size in SIZES.items()), "--tokens=4", "--tokens=60"]


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("asked", [[], ["--moe-backend", "flydsl"]])
def test_tune_moe_writes_the_fastest_and_keeps_other_rows(asked: list[str], tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    result = CliRunner().invoke(app, [*COMMAND, *asked, "--output", str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "measuring the flydsl backend on AMD Instinct MI325X" in result.output
    rows = json.loads(path.read_text())
    kept, (small, large) = rows[:-2], rows[-2:]
    assert kept == list(read_rows(TABLE)) and list(tmp_path.iterdir()) == [path]
    best = {"stage1": [64, 128], "stage2": [512, 128]}
    assert small["tiles"] == {"tile_m": 16, **best} and small["max_tokens"] == 4
    assert large["tiles"] == {"tile_m": 32, **best} and large["max_tokens"] is None
    for row in (small, large):
        assert row["backend"] == "flydsl" and row["source"].startswith("measured: AMD Instinct MI325X, ")
    assert FlydslBackend(table=path).tiles_for(SMALL, 60).to_row() == large["tiles"]
    assert FlydslBackend(table=path).tiles_for(KIMI[8], 60) == FlydslBackend().tiles_for(KIMI[8], 60)


@pytest.mark.usefixtures("pretended_gpu")
def test_tune_moe_refuses_tiles_fixed_by_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_FLYDSL_STAGE2_TILE_K", "256")
    result = CliRunner().invoke(app, [*COMMAND, "--output", str(tmp_path / "tiles.json")])
    assert isinstance(result.exception, KimiError) and "AITER_FLYDSL_STAGE2_TILE_K would override" in str(
        result.exception
    )
    assert not list(tmp_path.iterdir())


def test_the_baseline_has_no_tiles_to_measure() -> None:
    refuse_fixed_tiles({"FLYDSL_MOE_STAGE1_SCHED": False})
    with pytest.raises(KimiError, match="FLYDSL_W4A16_HYBRID would override"):
        refuse_fixed_tiles({"FLYDSL_W4A16_HYBRID": "w2_bf16"})
