"""Kernel checks in their own process, so that a GPU fault ends only that process and its memory is freed.

python -m kimi_w4a8_lab.accept.kernel_stage BACKEND WEIGHTS EXPERTS HIDDEN INTER TOP_K RESULT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import write_json
from kimi_w4a8_eagle3.engine.process import last_line
from kimi_w4a8_eagle3.gates import read_gates
from kimi_w4a8_eagle3.machine.hardware import GPUS, Gpu, Machine
from kimi_w4a8_eagle3.moe.contract import MoeBackend, MoeShape, gpu_arch
from kimi_w4a8_eagle3.moe.dispatch import load_backend
from kimi_w4a8_eagle3.quark.weight_format import FORMATS

from ..predict.machine_model import INT8_OPS
from .journal import Figure

if TYPE_CHECKING:
    import torch

TIMED = (8, 160, 10240)  # tokens of a verify step at con2 and con40, and of a prefill chunk
_FIRST = 2  # batches checked without a GPU


def check_kernels(backend: str, shape: MoeShape, gates: Mapping[str, str], result: Path) -> list[Figure]:
    """Start the process and return its figures; its log is written beside `result`. Raises KimiError."""
    sizes = (shape.num_experts, shape.hidden, shape.inter, shape.top_k)
    words = [backend, shape.weights.name, *map(str, sizes), str(result)]
    run_child(["-m", __name__, *words], gates, result.with_suffix(".log"))
    return [Figure(**figure) for figure in json.loads(result.read_text())]


def run_child(words: list[str], env: Mapping[str, str], log: Path) -> None:
    """Run Python with `words` to its end; raise KimiError with the last line of its log if it fails."""
    with log.open("ab") as stream:
        done = subprocess.run(
            [sys.executable, *words], env={**os.environ, **env}, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
        )
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise KimiError(f"the process ended with {how}: {last_line(log)}", where=str(log), remedy="read this log")


def main(words: list[str]) -> None:
    """Check every batch size, measure the times, and write the figures as JSON."""
    import torch  # start-up: torch, only in this process

    from ..kernels.agreement import agreements, batches  # start-up: torch

    name, weights, *numbers, result = words
    shape = MoeShape(*map(int, numbers), weights=FORMATS[weights])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = load_backend(name, read_gates(os.environ))
    if reason := backend.unsupported(shape, device):
        raise KimiError(f"the {name} backend cannot run: {reason}", where=str(shape))
    tokens = batches(name) if device.type == "cuda" else batches(name)[:_FIRST]
    worst = 0.0
    for agreement in agreements(backend, shape, tokens, device):
        print(f"{name} {shape}: {agreement}", flush=True)
        worst = max(worst, agreement.worst)
    figures = [Figure(name=f"{len(tokens)} batch sizes, worst token", value=100 * worst, unit="% from the reference")]
    if (arch := gpu_arch(device)) is not None:
        figures += _bandwidths(backend, shape, arch, device)
    write_json(Path(result), list(map(asdict, figures)))


def _bandwidths(backend: MoeBackend, shape: MoeShape, arch: str, device: torch.device) -> Iterator[Figure]:
    # start-up: torch
    from ..kernels.random_layers import random_batch
    from ..kernels.stopwatch import stopwatch

    watch, gpu = stopwatch(backend, shape, arch, device), Machine.detect().gpu or GPUS["mi325x"]
    for tokens in TIMED:
        experts = random_batch(shape, tokens, device)[2].unique().numel()
        for stage, us in enumerate(watch.measure(watch.chosen(tokens), tokens), start=1):
            if us is None:
                raise KimiError(f"the tiles of T={tokens} do not run", where=f"stage {stage}, {shape}")
            ideal, read = ideal_us(shape, stage, tokens, experts, gpu), experts * _bytes(shape, stage)
            name = f"stage {stage}, T={tokens}: {us:.1f} us"
            yield Figure(name=name, value=read / us / 1e6, unit="TB/s", predicted=read / ideal / 1e6)


def ideal_us(shape: MoeShape, stage: int, tokens: int, experts: float, gpu: Gpu) -> float:
    """Return the roofline: the weights of `experts` once at peak HBM bandwidth, or the products at peak INT8 rate."""
    read_s = experts * _bytes(shape, stage) / (gpu.hbm_tb_s * 1e12)
    return 1e6 * max(read_s, 2 * tokens * shape.top_k * _weights(shape, stage) / INT8_OPS)


def _weights(shape: MoeShape, stage: int) -> int:
    """Return the weights of one expert in one stage."""
    return shape.hidden * shape.inter * (2 if stage == 1 else 1)


def _bytes(shape: MoeShape, stage: int) -> float:
    """Return the bytes of one expert's weights in one stage, with its blocks' scales."""
    return _weights(shape, stage) * shape.weights.bits / 8


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KimiError as error:
        sys.exit(error.what)  # the last line of the log
