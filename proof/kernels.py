"""`python -m proof.kernels`: what the FlyDSL kernels' machine code costs, against saved figures and floors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.machine.hardware import Gpu, gpu_by_name
from kimi_w4a8_eagle3.moe.contract import MoeShape
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4

from .account import moe_time
from .account.blocks import padded_to
from .assembly import assembly
from .gfx942.parser import parse_kernel
from .kernel_counts import Figures, common_path, figures, floors, read_figures, regressions, write_figures

if TYPE_CHECKING:
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
    from kimi_w4a8_eagle3.moe.flydsl.configs import KernelConfig

LEAST_WIDTH = 150
FORMATS = {weights.name.lower(): weights for weights in (INT4, MXFP4)}
ALL_TP, ALL_TOKENS = {8, 4}, {2, 8, 40, 160, 10240}  # what a saved set covers
COLUMNS = {
    "mfma": "MFMA", "valu": "VALU", "multiplies": "mul", "transcendentals": "trans", "conversions": "cvt",
    "hot_ratio": "VALU/MFMA hot", "unpack_per_8": "unpack/8w", "weight_bytes_in_flight": "W B in flight",
    "exposed_waits": "exposed", "vgprs": "VGPR", "spilled_bytes": "spill B", "lds_bytes": "LDS B",
    "waves_per_simd": "waves/SIMD",
}  # fmt: skip
KERNELS = ("route", "stage1", "stage2", "reduce")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def kernels(
    tp: list[int] = typer.Option([8, 4], "--tp", min=1, help="Tensor-parallel sizes (2048 intermediate channels)."),
    weights: str = typer.Option("int4", "--weights", help="Format of the weights: int4 or mxfp4."),
    tokens: list[int] = typer.Option([2, 8, 40, 160, 10240], "--tokens", min=1, help="Batches that are shown."),
    gpu: str = typer.Option("mi325x", "--gpu", help="GPU of the floors."),
    compare: Path | None = typer.Option(None, "--compare", help="Saved figures; a worse figure is an error."),
    save: Path | None = typer.Option(None, "--save", help="Save the figures for a later --compare."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compile the gfx942 MoE kernels of Kimi-K2.5 and print their counts, registers, occupancy and floors; no GPU."""
    before = read_figures(compare) if compare else {}
    card = gpu_by_name(gpu)
    shapes = {size: MoeShape(384, 7168, 2048 // size, 8, weights=FORMATS[weights]) for size in tp}
    found: dict[str, Figures] = {}
    for size, shape in shapes.items():
        for batch in tokens:
            found.update(count_kernels(shape, batch, f"tp{size}"))
    saved = before or (read_figures(save) if save and save.exists() else {})
    others = {name: row for name, row in saved.items() if name.endswith("mxfp4") != (weights == "mxfp4")}
    if save:
        write_figures({**others, **found}, save)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console = Console(highlight=False)
        console.width = max(console.width, LEAST_WIDTH)
        _print_counts(console, found)
        for size, shape in shapes.items():
            _print_floors(console, card, shape, tokens, size, found)
            _print_times(console, card, shape, tokens, size)
    before = {name: row for name, row in before.items() if name not in others}
    if not (set(tp) >= ALL_TP and set(tokens) >= ALL_TOKENS):  # only a part was asked for
        before = {name: row for name, row in before.items() if name in found}
    worse = regressions(found, before)
    if worse:
        raise KimiError("\n  ".join(["machine code got worse:", *worse]), where=str(compare))


def count_kernels(shape: MoeShape, tokens: int, label: str) -> dict[str, Figures]:
    """Figures of every kernel that a batch launches, by name."""
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend

    found = {}
    for kernel, config in FlydslBackend().configs(shape, tokens).items():
        code = parse_kernel(common_path(assembly(config)))
        found[_name(label, kernel, config)] = figures(code, mfma_per_wave(config))
    return found


def mfma_per_wave(config: KernelConfig) -> int | None:
    """Return the matrix instructions that one wave executes for a full block, for the kernels with a rolled loop."""
    from kimi_w4a8_eagle3.moe.flydsl.configs import WAVES, ByTokenConfig, Stage1Config, Stage2Config

    if isinstance(config, Stage1Config):
        return config.row_tiles * (2 * config.tile_n // 16) * (config.hidden // 32) // WAVES
    if isinstance(config, Stage2Config):
        return config.tiles * config.row_tiles * (config.inter // 32)
    if isinstance(config, ByTokenConfig):
        return config.slots * (config.tile_n // 16) * (config.inter // 32)
    return None


def _name(label: str, kernel: str, config: Any) -> str:
    parts = (f"{axis}{getattr(config, f'tile_{axis}')}" for axis in "mnk" if hasattr(config, f"tile_{axis}"))
    format = [config.weights.name.lower()] if getattr(config, "weights", INT4) != INT4 else []
    return " ".join((label, kernel, *parts, *["short"] * getattr(config, "short", False), *format))


def _print_counts(console: Console, found: dict[str, Figures]) -> None:
    table = Table("kernel (one wave)", *COLUMNS.values())
    for name, row in found.items():
        table.add_row(name, *(f"{row[key]:g}" for key in COLUMNS))
    console.print(table)


def _print_floors(
    console: Console, card: Gpu, shape: MoeShape, tokens: list[int], size: int, found: dict[str, Figures]
) -> None:
    from kimi_w4a8_eagle3.moe.flydsl.backend import FlydslBackend
    from kimi_w4a8_eagle3.moe.flydsl.configs import ByTokenConfig

    backend: FlydslBackend = FlydslBackend()
    table = Table("us", "tokens", "weights from HBM", "MFMA", "MFMA padded", "SIMD bound of the code")
    for batch in tokens:
        configs = backend.configs(shape, batch)
        for stage in (1, 2):
            config: Any = configs[f"stage{stage}"]
            if isinstance(config, ByTokenConfig):  # has no blocks of rows
                continue
            wave = found[_name(f"tp{size}", f"stage{stage}", config)]
            least = floors(card, shape, batch, stage, (config.tile_m, config.tile_n), wave, padded_to(config.tile_m))
            cells = (least.weights_us, least.mfma_us, least.padded_mfma_us, least.simd_us)
            table.add_row(f"tp{size} stage {stage}", str(batch), *(f"{cell:.1f}" for cell in cells))
    console.print(table)


def _print_times(console: Console, card: Gpu, shape: MoeShape, tokens: list[int], size: int) -> None:
    table = Table(f"tp{size}, us by the model", "launches", "layer", *KERNELS)
    for batch in tokens:
        parts = {part.name: part for part in moe_time.ours(card, shape, batch)}
        total = sum(part.us for part in parts.values()), sum(part.launches for part in parts.values())
        table.add_row(
            str(batch), str(total[1]), f"{total[0]:.0f}", *(f"{parts[n].us:.0f}" if n in parts else "" for n in KERNELS)
        )
    console.print(table)


if __name__ == "__main__":
    run(app)
