"""`kimi tune-moe`: measure the Triton MoE's tile choices on this machine's GPU and write the tile table."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

KEY = ("backend", "arch", "hidden", "inter")  # measured rows replace all earlier rows of this key


def tune_moe(
    hidden: int = typer.Option(7168, min=16, help="Hidden size."),
    inter: int = typer.Option(2048, min=16, help="MoE intermediate size of the whole model."),
    tp: int = typer.Option(8, min=1, help="Ranks that share it."),
    experts: int = typer.Option(384, min=1, help="Routed experts."),
    top_k: int = typer.Option(8, min=1, help="Experts a token."),
    tokens: list[int] = typer.Option([], "--tokens", min=1, help="Batch sizes to tune; default: 2 to 10240."),
    output: Path | None = typer.Option(None, "--output", help="The table to update; default: the package's own."),
) -> None:
    """Measure tile choices on this GPU and write the fastest into the table; rows of other shapes and GPUs stay."""
    import torch

    from ..errors import KimiError
    from ..moe.contract import MoeShape
    from ..moe.dispatch import gpu_arch
    from ..moe.tiles import TABLE, read_rows, write_rows

    arch = gpu_arch(torch.device("cuda"))
    if arch is None:
        raise KimiError(
            "this machine has no GPU to measure on",
            expected="a GPU that torch sees (torch.cuda.is_available())",
            remedy="run `kimi tune-moe` on the machine that will serve",
        )
    if inter % tp:
        raise KimiError(f"{inter} columns cannot be split over {tp} ranks", where="--tp")
    table = output or TABLE
    rows = [*read_rows(table if table.exists() else TABLE)]  # a table that cannot be read fails before the measuring

    from ..moe.tune import BATCHES, gpu_measure, search, table_rows

    device, console = torch.device("cuda"), Console()
    shape = MoeShape(experts, hidden, inter // tp, top_k)
    found = []
    for best in search(shape, sorted(set(tokens)) or BATCHES, gpu_measure(shape, arch, device)):
        console.print(f"T={best.tokens}: {best.stage1_us:.1f} + {best.stage2_us:.1f} us, {best.tiles.to_row()}")
        found.append(best)

    new = table_rows(found, shape, arch, torch.cuda.get_device_name(device))
    replaced = {tuple(row[key] for key in KEY) for row in new}
    write_rows([row for row in rows if tuple(row[key] for key in KEY) not in replaced] + new, table)
    console.print(f"wrote {len(found)} rows to {table}")
