"""Tile search, the table that it writes, and the command around it, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.tiles import TABLE, find_row
from kimi_w4a8_eagle3.moe.triton.backend import StageTile, TritonTiles
from kimi_w4a8_lab.kernels.tile_search import merged, search, table_rows, write_rows
from kimi_w4a8_lab.kernels.triton_tiles import triton_measure, triton_space

SHAPE = MoeShape(num_experts=384, hidden=7168, inter=256, top_k=8)


def fake_gpu(tiles: TritonTiles, tokens: int) -> tuple[float | None, float | None]:
    """Costs with one known best: stage 1 likes 64 columns and 3 stages, stage 2 likes 256; wide steps do not run."""
    padded = abs(tiles.block_m - (16 if tokens < 1000 else 64))
    stage1 = abs(tiles.stage1.block_n - 64) + abs(tiles.stage1.num_stages - 3) + tiles.stage1.num_warps
    stage2 = 256 - tiles.stage2.block_n + tiles.stage2.num_warps + 2 * (tiles.partial_mib != 32)
    time1 = padded + stage1 + 128 - tiles.stage1.block_k + 1.0
    return None if tiles.stage1.block_k == 256 else time1, padded + stage2 + 128 - tiles.stage2.block_k + 1.0


def test_the_search_finds_the_fastest_tiles(tmp_path: Path) -> None:
    found = list(search(SHAPE, [8, 10240], triton_space(SHAPE), fake_gpu))
    assert [entry.tiles.block_m for entry in found] == [16, 64]
    for entry in found:
        assert entry.tiles.stage1 == StageTile(64, 128, 4, 3)
        assert (entry.tiles.stage2.block_n, entry.tiles.stage2.block_k, entry.tiles.stage2.num_warps) == (256, 128, 4)
        assert entry.tiles.partial_mib == 32

    path = tmp_path / "tiles.json"
    write_rows(table_rows(found, "triton", SHAPE, "sm_90", "a test"), path)
    row = find_row("triton", "sm_90", SHAPE, 9, path)
    assert row is not None and TritonTiles.from_row(row["tiles"]) == found[1].tiles
    assert row["max_tokens"] is None and row["source"].startswith("measured: a test")


def test_each_stage_is_timed_with_its_own_launches() -> None:
    """The GPU's part with the launches recorded: no GPU, but the code that would time one."""
    shape = MoeShape(num_experts=6, hidden=160, inter=80, top_k=3)
    names: list[str] = []
    timed: list[list[str]] = []

    def timer(function: Callable[[], object]) -> float:
        names.clear()
        function()
        timed.append(list(names))
        return float(len(names))

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)

    measure = triton_measure(shape, "gfx942", torch.device("cpu"), timer, launch)
    tiles = TritonTiles(16, StageTile(32, 64, 4, 2), StageTile(64, 32, 4, 2), 128)
    assert measure(tiles, 5) == (2.0, 2.0)
    assert timed == [["stage1", "quantize_act"], ["stage2", "reduce_slots"]]


def test_nothing_that_runs_is_an_error_and_no_row() -> None:
    with pytest.raises(KimiError, match="no tile of the triton backend ran"):
        list(search(SHAPE, [8], triton_space(SHAPE), lambda tiles, tokens: (None, 1.0)))


def test_measured_rows_replace_only_those_of_the_same_gpu_shape_and_backend() -> None:
    best = next(search(SHAPE, [8], triton_space(SHAPE), fake_gpu))
    new = table_rows([best], "triton", SHAPE, "sm_90", "a test")
    differences = {"backend": "flydsl", "arch": "gfx942", "inter": 512, "weights": "MXFP4"}
    others = [{**new[0], key: value} for key, value in differences.items()]
    old = {**new[0], "max_tokens": 3, "source": "counted"}
    assert merged([old, *others], new) == others + new


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no GPU"),
        (["--moe-backend", "flydsl"], "no GPU"),
        (["--moe-backend", "triton"], "no GPU"),
        (["--moe-backend", "reference"], "'reference' is not one of"),
        (["--tp", "3"], "cannot be split over 3"),
    ],
)
def test_tune_moe_refuses_what_it_cannot_measure(arguments: list[str], message: str, tmp_path: Path) -> None:
    before = TABLE.read_bytes()
    result = CliRunner().invoke(app, ["tune-moe", *arguments, "--output", str(tmp_path / "tiles.json")])
    assert result.exit_code != 0 and message in f"{result.exception}{result.output}"
    assert TABLE.read_bytes() == before and not list(tmp_path.iterdir())
