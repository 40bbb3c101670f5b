"""`kimi-w4a8 tune-moe`: measure the MoE's tile choices on this machine's GPU and write the tile table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import typer

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.installed import require
from kimi_w4a8_eagle3.gates import read_gates
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.moe.dispatch import gpu_arch, select_backend
from kimi_w4a8_eagle3.moe.tiles import TABLE, read_rows

from ..base.run_folder import require_writable


def tune_moe(
    hidden: int = typer.Option(7168, min=16, help="Hidden size."),
    inter: int = typer.Option(2048, min=16, help="MoE intermediate size of the whole model."),
    tp: int = typer.Option(8, min=1, help="Tensor-parallel ranks."),
    experts: int = typer.Option(384, min=1, help="Routed experts."),
    top_k: int = typer.Option(8, min=1, help="Experts per token."),
    tokens: list[int] = typer.Option([], "--tokens", min=1, help="Batch sizes to tune; default: 2 to 10240."),
    moe_backend: Literal["auto", "flydsl", "triton"] = typer.Option("auto", "--moe-backend", help="As for serving."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Table to update; default: the package's."),
) -> None:
    """Measure tile choices on this GPU, and write the fastest.

    Rows of other shapes and GPUs stay in the table.
    """
    import torch  # start-up: torch

    if inter % tp:
        raise UsageError(f"{inter} columns cannot be split over {tp} ranks", "--tp", f"a divisor of {inter}")
    device = torch.device("cuda")
    arch = gpu_arch(device)
    if arch is None:
        raise KimiError(
            "this machine has no GPU to measure on",
            expected="a GPU that torch sees (torch.cuda.is_available())",
            remedy="run `kimi-w4a8 tune-moe` on the machine that will serve",
        )
    require("triton")  # its benchmark routine measures both backends
    table = output or TABLE
    require_writable(table.parent)
    rows = read_rows(table if table.exists() else TABLE)  # an unreadable table fails before the measurement

    # start-up: torch
    from ..kernels.stopwatch import stopwatch
    from ..kernels.tile_search import BATCHES, merged, search, table_rows, write_rows

    gates, console = read_gates(os.environ), table_console()
    shape = MoeShape(experts, hidden, inter // tp, top_k)
    backend = select_backend(shape, device, gates, moe_backend)
    if backend.name == "flydsl":
        from ..kernels.flydsl_tiles import refuse_fixed_tiles  # optional: flydsl

        refuse_fixed_tiles(gates)
    watch = stopwatch(backend, shape, arch, device)
    console.print(f"measuring the {backend.name} backend on {torch.cuda.get_device_name(device)}")
    found = []
    for best in search(shape, sorted(set(tokens)) or BATCHES, watch.space, watch.measure):
        console.print(f"T={best.tokens}: {best.stage1_us:.1f} + {best.stage2_us:.1f} us, {best.tiles.to_row()}")
        found.append(best)

    new = table_rows(found, backend.name, shape, arch, torch.cuda.get_device_name(device))
    write_rows(merged(rows, new), table)
    console.print(f"wrote {len(found)} rows to {table}")
