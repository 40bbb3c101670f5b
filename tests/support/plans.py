"""Plans of layouts with made-up figures."""

from __future__ import annotations

from kimi_w4a8_lab.predict.layouts import node_layouts
from kimi_w4a8_lab.predict.simulation import SimulationJob, Slo, TrafficFigures
from kimi_w4a8_lab.predict.trace_plan import TracePlan, choose_winner
from kimi_w4a8_lab.speed.trace import Segment, Trace, TraceSession, Turn

LAYOUTS = node_layouts()


def figures(layout: str, goodput: float, good: float = 0.97, users: int | None = 8) -> TrafficFigures:
    times = {"ttft_p50_s": 0.5, "ttft_p95_s": 1.5, "tpot_p50_ms": 20.0, "tpot_p95_ms": 39.0}
    rates = {"goodput_tok_s": goodput, "throughput_tok_s": goodput, "tokens_per_gpu_hour": goodput * 450}
    return TrafficFigures(
        layout=layout, users=users, scale=1, requests=100, hit_rate=0.9, good=good, cpu_s=1, **times, **rates
    )


def plan(goodputs: dict[str, float], good: float = 0.97, name: str = "t") -> TracePlan:
    chosen = {}
    for layout in LAYOUTS:
        value = goodputs.get(layout.name, 100.0)
        chosen[layout.name] = tuple(figures(layout.name, value * scale, good) for scale in (1, 0.9, 1.1))
    trace = Trace(name, "AgentX", (TraceSession("a", (Turn((Segment("x", 9),), 3),)),))
    winner, stays = choose_winner(LAYOUTS, chosen)  # type: ignore[arg-type]
    curves = {one.name: [figures(one.name, 50, 1, 4), chosen[one.name][0]] for one in LAYOUTS}
    job = SimulationJob(trace=name, slo=Slo(2, 0.04), horizon_s=600, accept_length=2.7, runs=[])
    return TracePlan(trace, job, 8, 0.1, LAYOUTS, curves, chosen, winner, stays)  # type: ignore[arg-type]
