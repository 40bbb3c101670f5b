"""`kimi-w4a8 quantize`: make the W4A8 target or the FP8 draft with AMD Quark, and tell what it did to the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.console import table_console
from ..base.run_dir import write_json
from ..fetch.progress import show
from ..quark import exclude, sources
from ..quark.by_shard import Outcome, quantize_by_shard
from ..quark.fp8_draft import DRAFT_EXCLUDE, quantize_fp8
from ..quark.quantize import KIMI_EXCLUDE, quantize_w4a8
from ..quark.safetensors_header import Checkpoint
from .options import expanded

if TYPE_CHECKING:
    from ..quark.weight_errors import Report

app = typer.Typer(
    name="quantize", help="Quantize a target or a draft with AMD Quark, shard by shard.", no_args_is_help=True
)

SOURCE = typer.Argument(..., metavar="SRC", help="Folder of the checkpoint to quantize.")
DESTINATION = typer.Argument(
    ..., metavar="DST", help="Folder to make; an interrupted run continues with the same command."
)
REPORT_WIDTH = 120
REPORT = typer.Option(None, "--report", help="Also write the whole report to this JSON file.")
AS_JSON = typer.Option(False, "--json", help="Print the report as JSON.")


@dataclass(frozen=True)
class Job:
    """How to quantize and what to tell of it."""

    device: str = typer.Option("cpu", "--device", help="Where Quark computes: cpu, cuda, cuda:1, ...")
    report: Path | None = REPORT
    no_report: bool = typer.Option(False, "--no-report", help="Do not compare the weights afterwards.")
    as_json: bool = AS_JSON
    verbose: bool = typer.Option(False, "--verbose", help="Show Quark's own messages.")


@app.command("w4a8-target")
@expanded
def w4a8_target(
    source: Path = SOURCE,
    destination: Path = DESTINATION,
    exclude: list[str] = typer.Option([], "--exclude", help="Layers to leave alone instead of the published list."),
    *,
    job: Job,
) -> None:
    """Kimi-K2-Thinking, K2.5, K2.6 or K2.7-Code -> INT4 experts in the format of amd/Kimi-K2.5-W4A8.

    SRC is BF16, or INT4 in groups (compressed-tensors `pack-quantized`), as Moonshot ships all four.
    """
    patterns = exclude or list(KIMI_EXCLUDE)
    version = sources.require_quark()
    config, checkpoint = sources.read_source(source)
    sources.require_target(config, checkpoint, patterns, optional=sources.VISION)

    def quantize(folder: Path, result: Path) -> None:
        quantize_w4a8(folder, result, exclude=patterns, device=job.device, verbose=job.verbose)

    settings = {"format": "w4a8", "exclude": patterns, "quark": version, "device": job.device}
    _run(checkpoint, destination, quantize, settings)
    if not job.no_report:
        _tell(source, destination, job.report, job.as_json)


@app.command("fp8-draft")
@expanded
def fp8_draft(
    source: Path = SOURCE,
    destination: Path = DESTINATION,
    vllm_exclude: bool = typer.Option(False, "--vllm-exclude", help="Write the exclude list as vLLM reads it."),
    *,
    job: Job,
) -> None:
    """EAGLE3 draft -> FP8 weights per channel (`ptpc_fp8`); fc and lm_head stay."""
    version = sources.require_quark()
    config, checkpoint = sources.read_source(source)
    sources.require_draft(config, checkpoint)

    def quantize(folder: Path, result: Path) -> None:
        quantize_fp8(folder, result, device=job.device, verbose=job.verbose)
        if vllm_exclude:
            exclude.fix_exclude(result)

    settings = {"format": "ptpc_fp8", "exclude": list(DRAFT_EXCLUDE), "quark": version, "device": job.device}
    _run(checkpoint, destination, quantize, settings | {"vllm": vllm_exclude})
    if not job.no_report:
        _tell(source, destination, job.report, job.as_json)


@app.command("fix-exclude")
def fix_exclude(directory: Path = typer.Argument(..., metavar="DIR", help="Folder of an FP8 draft.")) -> None:
    """Rewrite a draft's exclude list (fc, lm_head) as the patterns that vLLM needs; doing it twice is harmless."""
    changed = exclude.fix_exclude(directory)
    typer.echo(f"{directory / 'config.json'}: {'rewritten' if changed else 'already as vLLM reads it'}")


@app.command("report")
def show_report(
    source: Path = typer.Argument(..., metavar="SRC", help="Folder of the checkpoint before quantization."),
    destination: Path = typer.Argument(..., metavar="DST", help="Folder of the quantized one."),
    report: Path | None = REPORT,
    as_json: bool = AS_JSON,
) -> None:
    """Compare a quantized checkpoint with its source: errors, outlier rows, dtypes, sizes."""
    _tell(source, destination, report, as_json)


def _run(
    checkpoint: Checkpoint, destination: Path, quantize: Callable[[Path, Path], None], job: dict[str, Any]
) -> Outcome:
    console = _stderr()
    total = sum(file.stat().st_size for file in checkpoint.files)
    with show(console, f"quantize {checkpoint.directory.name}", total) as advance:
        outcome = quantize_by_shard(checkpoint, destination, quantize, job, advance)
    again = f", {outcome.resumed} of them by an earlier run" if outcome.resumed else ""
    console.print(f"kimi: {outcome.shards} shards quantized{again}: {destination}")
    return outcome


def _tell(source: Path, destination: Path, file: Path | None, as_json: bool) -> None:
    from ..quark.weight_errors import compare  # start-up: torch

    found = compare(source, destination)
    if file is not None:
        write_json(file, found.as_dict())
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)


def _print(report: Report) -> None:
    console = table_console()
    console.width = max(console.width, REPORT_WIDTH)  # names of weights are worth more than a narrow table
    table = Table(title="quantized weights, worst kind first")
    for name in ("weights", "count", "relative error", "worst SQNR dB", "outlier rows", "worst row"):
        table.add_column(name, justify="left" if name == "weights" else "right", no_wrap=True)
    for kind in report.kinds():
        worst = f"{kind.worst.worst_row_error:.4f}"
        table.add_row(
            kind.name,
            str(kind.count),
            f"{kind.relative_error:.4f}",
            f"{kind.sqnr_db:.1f}",
            str(kind.outlier_rows),
            worst,
        )
    console.print(table)
    counts = [", ".join(f"{n} {d}" for d, n in found.items()) for found in (report.dtypes_before, report.dtypes_after)]
    console.print(f"tensors: {counts[0]} -> {counts[1]}; {report.unchanged} unchanged")
    share = report.bytes_after / report.bytes_before
    console.print(f"size: {report.bytes_before:,} -> {report.bytes_after:,} bytes ({share:.1%})")


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)
