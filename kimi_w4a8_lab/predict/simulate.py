"""`run_module kimi_w4a8_lab.predict.simulate JOB RESULTS`: simulate a job and write a line for each run.

It is a program of its own, because SGLang's classes need its imports and a configuration for the whole process.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..speed.trace import Trace
from ..speed.trace_readers import read_trace
from .layouts import NODE_GPUS
from .machine_model import Cluster
from .predict import calibrate
from .simulation import SimulatedRun, SimulationJob, Slo, TrafficFigures
from .step_time import KimiStepTime
from .traffic import Traffic

ENOUGH = 10000  # answers after which a simulation ends early: many short requests would take minutes


def run(job: SimulationJob, trace: Trace, one: SimulatedRun) -> TrafficFigures:
    layout, length = one.layout, one.accept_length
    settings = replace(layout, accept_length=length, seed=one.seed)
    steps = KimiStepTime(calibrate(Cluster()), layout.cluster, 0 if length == 1 else 3, scale=one.scale)
    enough = math.inf if one.lockstep or one.users is None else ENOUGH
    traffic = Traffic(trace, settings, steps, one.users, job.horizon_s, one.lockstep, enough)
    traffic.run()
    return _figures(job.slo, one, traffic)


def _figures(slo: Slo, one: SimulatedRun, traffic: Traffic) -> TrafficFigures:
    """Return the figures of the requests that arrived after all users had started. A refused request has missed."""
    ramp = traffic.ramp_s
    served = [request for request in traffic.served if request.arrived >= ramp]
    # At the end some requests wait for their first token: those past the limit have missed it.
    waited = [traffic.horizon_s - request.arrived for request in traffic.unfinished.values() if not request.first]
    late = [seconds for seconds in waited if slo.ttft_s < seconds <= traffic.horizon_s - ramp]
    refused = sum(arrived >= ramp for arrived in traffic.refused)
    lasted = (traffic.horizon_s if late else max((request.end for request in served), default=ramp)) - ramp
    ttft = [*(request.ttft_s for request in served), *late] or [0.0]
    tpot = [request.tpot_s for request in served] or [0.0]
    prompts = sum(request.turn.prompt_tokens for request in served)
    good = [request for request in served if request.ttft_s <= slo.ttft_s and request.tpot_s <= slo.tpot_s]
    tokens, good_tokens = (sum(request.turn.output_tokens for request in found) for found in (served, good))
    return TrafficFigures(
        run=one,
        requests=len(served),
        refused=refused,
        hit_rate=sum(request.cached for request in served) / max(prompts, 1),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        tpot_p50_ms=float(np.percentile(tpot, 50)) * 1000,
        tpot_p95_ms=float(np.percentile(tpot, 95)) * 1000,
        good=len(good) / max(len(served) + len(late) + refused, 1),
        goodput_tok_s=good_tokens / max(lasted, 1e-9),
        throughput_tok_s=tokens / max(lasted, 1e-9),
        tokens_per_gpu_hour=tokens / max(lasted, 1e-9) * 3600 / NODE_GPUS,
    )


def main(job_file: Path, results: Path) -> None:
    """Run a job and write each result as soon as it is known."""
    job = SimulationJob.model_validate_json(job_file.read_text())
    trace = read_trace(Path(job.trace))
    with results.open("a") as file:
        for one in job.runs:
            print(json.dumps(run(job, trace, one).model_dump()), file=file, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
