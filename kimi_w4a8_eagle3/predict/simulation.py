"""Jobs of simulations and their results, and the process that runs one.

The process has SGLang's imports and a configuration for SGLang as a whole (`simulate.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel

from ..base.errors import KimiError
from ..engine.process import last_line
from ..engine.starter import Program, starter

_ENVIRON = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class SimulatedRun(BaseModel):
    """One simulation to run. users: None for the recorded times. scale: factor on every step's time."""

    layout: dict[str, Any]
    users: int | None
    scale: float = 1.0


class SimulationJob(BaseModel):
    """Simulations of one trace."""

    trace: str
    output_tokens: int
    horizon_s: float
    accept_length: float
    ttft_s: float
    tpot_s: float
    runs: list[SimulatedRun]


class TrafficFigures(BaseModel):
    """Figures of one simulation. good: share of the requests that meet the SLO. Throughput is of output tokens.

    requests_s: requests that ended in a second. in_flight: requests in the engines, in the mean.
    """

    layout: str
    users: int | None
    scale: float
    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    good: float
    goodput_tok_s: float
    throughput_tok_s: float
    tokens_per_gpu_hour: float
    requests_s: float
    in_flight: float
    cpu_s: float


def simulate(job: SimulationJob, show: Callable[[int], None]) -> list[TrafficFigures]:
    """Run a job in a process with SGLang's classes and return its figures, in the order of its runs."""
    with TemporaryDirectory(prefix="kimi-plan-") as name:
        folder = Path(name)
        job_file, results, log = folder / "job.json", folder / "results.jsonl", folder / "log"
        job_file.write_text(job.model_dump_json())
        program = Program("kimi_w4a8_eagle3.predict.simulate", (str(job_file), str(results)))
        with log.open("ab") as file:
            process = starter().program(program, _ENVIRON, file.fileno())
        try:
            while process.poll() is None:
                show(len(_lines(results)))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
        if code != 0:
            remedy = "install SGLang: its scheduler runs in the simulation"
            raise KimiError(f"the simulation ended with {code}: {last_line(log)}", where=job.trace, remedy=remedy)
        return [TrafficFigures.model_validate(json.loads(line)) for line in _lines(results)]


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.is_file() else []
