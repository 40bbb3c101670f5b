"""Jobs of simulations and their results, and the process that runs one.

The process has SGLang's imports and a configuration for SGLang as a whole (`simulate.py`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.engine.process import Program, last_line, starter
from kimi_w4a8_eagle3.fleet.serve import signals_raise

from .layouts import Layout

_ENVIRON = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
_UNITS = {"ms": 0.001, "s": 1.0}
_LIMIT = r"\s*(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*"


@dataclass(frozen=True)
class Slo:
    """Most seconds to the first token, and most seconds for each token after it."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=2s,tpot=40ms`."""
        parts = [re.fullmatch(_LIMIT, part) for part in text.split(",")]
        found = {part[1]: float(part[2]) * _UNITS[part[3]] for part in parts if part}
        if len(parts) == len(found) == 2 and all(found.values()):
            return cls(found["ttft"], found["tpot"])
        raise UsageError(f"not an SLO: {text!r}", where="--slo", expected="both limits, such as ttft=2s,tpot=40ms")

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s:g} s, TPOT {self.tpot_s * 1000:g} ms"


class SimulatedRun(BaseModel):
    """One simulation to run. users: None for the recorded times. scale: factor on every step's time.

    lockstep: all users start at once, and a recorded loop is sent once. seed: another order and other starts.
    """

    layout: Layout
    users: int | None
    accept_length: float
    scale: float = 1.0
    seed: int = 0
    lockstep: bool = False


class SimulationJob(BaseModel):
    """Simulations of one trace."""

    trace: str
    slo: Slo
    horizon_s: float
    runs: list[SimulatedRun]


class TrafficFigures(BaseModel):
    """Figures of one simulation. good: share of the requests that meet the SLO. Throughput is of output tokens.

    refused: requests for which the layout has no room; they have missed the SLO.
    """

    run: SimulatedRun
    requests: int
    refused: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    good: float
    goodput_tok_s: float
    throughput_tok_s: float
    tokens_per_gpu_hour: float

    @property
    def layout(self) -> str:
        return self.run.layout.name

    @property
    def users(self) -> int | None:
        return self.run.users


def simulate(job: SimulationJob, show: Callable[[int], None]) -> list[TrafficFigures]:
    """Run a job in a process with SGLang's classes and return its figures, in the order of its runs."""
    with signals_raise(), TemporaryDirectory(prefix="kimi-rank-") as name:
        folder = Path(name)
        job_file, results, log = folder / "job.json", folder / "results.jsonl", folder / "log"
        job_file.write_text(job.model_dump_json())
        program = Program("kimi_w4a8_lab.predict.simulate", (str(job_file), str(results)))
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
