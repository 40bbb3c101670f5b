"""Plans of layouts with made-up figures."""

from __future__ import annotations

from kimi_w4a8_lab.predict.layouts import node_layouts
from kimi_w4a8_lab.predict.simulation import SimulatedRun, SimulationJob, Slo, TrafficFigures
from kimi_w4a8_lab.predict.trace_plan import TracePlan, variations
from kimi_w4a8_lab.speed.trace import Segment, Trace, TraceSession, Turn

LAYOUTS = node_layouts()


BY_NAME = {layout.name: layout for layout in LAYOUTS}
SCALES = (1, 0.9, 1.1, 0.95, 1.05, 0.98, 1.02)  # of a goodput, for each of the variations


def figures(layout: str, goodput: float, good: float = 0.97, users: int | None = 8) -> TrafficFigures:
    times = {"ttft_p50_s": 0.5, "ttft_p95_s": 1.5, "tpot_p50_ms": 20.0, "tpot_p95_ms": 39.0}
    rates = {"goodput_tok_s": goodput, "throughput_tok_s": goodput, "tokens_per_gpu_hour": goodput * 450}
    run = SimulatedRun(layout=BY_NAME[layout], users=users, accept_length=2.7)
    return TrafficFigures(run=run, requests=100, refused=0, hit_rate=0.9, good=good, **times, **rates)


def plan(goodputs: dict[str, float], good: float | dict[str, float] = 0.97, name: str = "t") -> TracePlan:
    """good: of every layout, or of some."""
    assert len(variations(0.1, 2.7)) == len(SCALES)
    chosen = {}
    for layout in BY_NAME:
        share = good if isinstance(good, float) else good.get(layout, 0.97)
        chosen[layout] = [figures(layout, goodputs.get(layout, 100.0) * scale, share) for scale in SCALES]
    trace = Trace(name, "AgentX", (TraceSession("a", (Turn((Segment("x", 9),), 3),)),))
    curves = {one: [figures(one, 50, 1, 4), chosen[one][0]] for one in BY_NAME}
    job = SimulationJob(trace=name, slo=Slo(2, 0.04), horizon_s=600, runs=[chosen["1 x TP 8"][0].run])
    return TracePlan(trace, job, 8, 0.1, LAYOUTS, curves, chosen)
