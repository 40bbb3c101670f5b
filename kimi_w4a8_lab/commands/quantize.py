"""`kimi-w4a8 quantize`: make the W4A8 target or the FP8 draft with AMD Quark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from kimi_w4a8_eagle3.quark.safetensors_header import Checkpoint
from kimi_w4a8_eagle3.quark.weight_format import INT4, MXFP4

from ..base.request_progress import request_progress
from ..quantize import exclude, sources
from ..quantize.by_shard import quantize_by_shard
from ..quantize.quantize import DRAFT_EXCLUDE, KIMI_EXCLUDE, quantize_fp8, quantize_w4a8
from .groups import expanded

app = typer.Typer(
    name="quantize", help="Quantize a target or a draft with AMD Quark, shard by shard.", no_args_is_help=True
)


SOURCE = typer.Argument(..., metavar="SRC", help="Folder of the checkpoint to quantize.")
DESTINATION = typer.Argument(
    ..., metavar="DST", help="Folder to create; an interrupted run resumes with the same command."
)


@dataclass(frozen=True)
class Job:
    """Options of a quantization."""

    device: str = typer.Option("cpu", "--device", help="Device for Quark: cpu, cuda, cuda:1, ...")
    verbose: bool = typer.Option(False, "--verbose", help="Show Quark's own messages.")


@app.command("w4a8-target", epilog="Example: kimi-w4a8 quantize w4a8-target SRC DST")
@expanded
def w4a8_target(
    source: Path = SOURCE,
    destination: Path = DESTINATION,
    weights: Literal["int4", "mxfp4"] = typer.Option("int4", "--format", help="Format of the experts' weights."),
    exclude: list[str] = typer.Option([], "--exclude", help="Layers not to quantize, instead of the published list."),
    *,
    job: Job,
) -> None:
    """Quantize a target: experts in INT4 or MXFP4.

    It is Kimi-K2-Thinking, K2.5, K2.6 or K2.7-Code, and INT4 is as in amd/Kimi-K2.5-W4A8. SRC is BF16, or INT4 in
    groups (compressed-tensors `pack-quantized`), as Moonshot ships all four.
    """
    patterns = exclude or list(KIMI_EXCLUDE)
    version = sources.require_quark()
    config, checkpoint = sources.read_source(source)
    sources.require_target(config, checkpoint, patterns, optional=sources.VISION)

    def quantize(folder: Path, result: Path) -> None:
        stored = MXFP4 if weights == "mxfp4" else INT4
        quantize_w4a8(folder, result, weights=stored, exclude=patterns, device=job.device, verbose=job.verbose)

    settings = {"format": weights, "exclude": patterns, "quark": version, "device": job.device}
    _run(checkpoint, destination, quantize, settings)


@app.command("fp8-draft", epilog="Example: kimi-w4a8 quantize fp8-draft SRC DST")
@expanded
def fp8_draft(
    source: Path = SOURCE,
    destination: Path = DESTINATION,
    vllm_exclude: bool = typer.Option(False, "--vllm-exclude", help="Write the exclude list in vLLM's form."),
    *,
    job: Job,
) -> None:
    """Quantize an EAGLE3 draft to FP8 weights per channel.

    The scheme is `ptpc_fp8`; fc and lm_head stay.
    """
    version = sources.require_quark()
    config, checkpoint = sources.read_source(source)
    sources.require_draft(config, checkpoint)

    def quantize(folder: Path, result: Path) -> None:
        quantize_fp8(folder, result, device=job.device, verbose=job.verbose)
        if vllm_exclude:
            exclude.fix_exclude(result)

    settings = {"format": "ptpc_fp8", "exclude": list(DRAFT_EXCLUDE), "quark": version, "device": job.device}
    _run(checkpoint, destination, quantize, settings | {"vllm": vllm_exclude})


@app.command("fix-exclude", epilog="Example: kimi-w4a8 quantize fix-exclude DIR")
def fix_exclude(directory: Path = typer.Argument(..., metavar="DIR", help="Folder of an FP8 draft.")) -> None:
    """Rewrite a draft's exclude list for vLLM.

    fc and lm_head become the patterns that vLLM needs. Repeating it is harmless.
    """
    changed = exclude.fix_exclude(directory)
    typer.echo(f"{directory / 'config.json'}: {'rewritten' if changed else 'already in the form of vLLM'}")


def _run(
    checkpoint: Checkpoint, destination: Path, quantize: Callable[[Path, Path], None], job: dict[str, Any]
) -> None:
    from ..draft.states import device_of  # start-up: torch

    device_of(job["device"])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with request_progress(f"shards of {checkpoint.directory.name}", len(checkpoint.files), console) as show:
        outcome = quantize_by_shard(checkpoint, destination, quantize, job, show)
    again = f", {outcome.resumed} of them by an earlier run" if outcome.resumed else ""
    console.print(f"kimi-w4a8: {outcome.shards} shards quantized{again}: {destination}")
