"""`python -m proof.account.layouts`: layouts of one node with eight MI325X, as rows of docs/perf/layouts.md.

Every layout is simulated under prompts of varied lengths that share nothing, from users who start one after another and
send a new prompt as soon as they have an answer. Lockstep is a special case: equal requests that start together, as in
benchmarks, by the formulas of `bench predict`. The fit knows only published figures of one engine on eight GPUs. A
layout is recommended if it gains at least `RECOMMENDED` in service at some load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.predict.layouts import Layout, node_layouts
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Fit, Load, calibrate, predict
from kimi_w4a8_lab.predict.simulation import SimulatedRun, SimulationJob, Slo, simulate

CONCURRENCIES, CONTEXTS, OUTPUT = (8, 40), (2048, 10240, 65536), 512
COMPARED = 10240, 40  # the published load, of which the page has all figures
RECOMMENDED = 1.25
SPREAD, PROMPTS = 0.5, 400  # lengths are between half and one and a half of the mean
SECONDS = {2048: 600.0, 10240: 600.0, 65536: 1800.0}


@dataclass(frozen=True)
class LayoutFigures:
    """Figures of a node: throughput of all engines, TPOT and TTFT of a request."""

    tokens_per_s: float
    tpot_ms: float
    ttft_s: float


def in_lockstep(chosen: Layout, concurrency: int, context: int, accept_length: float, fit: Fit) -> LayoutFigures:
    """Return the figures of `concurrency` equal requests of `context` input tokens that start together."""
    load = Load(concurrency // chosen.engines, context, OUTPUT, steps=3, accept_length=accept_length)
    rate, tpot, ttft = (
        predict(load, key, fit, chosen.cluster)
        for key in ("output_throughput_tok_s", "tpot_median_ms", "ttft_median_ms")
    )
    return LayoutFigures(chosen.engines * rate, tpot, ttft / 1000)


def in_service(
    layouts: Sequence[Layout], context: int, concurrencies: Sequence[int], accept_length: float
) -> dict[int, list[LayoutFigures]]:
    """Return the simulated figures of the layouts by concurrency."""
    runs = [
        SimulatedRun(layout=one, users=count, accept_length=accept_length) for count in concurrencies for one in layouts
    ]
    with TemporaryDirectory(prefix="kimi-layouts-") as folder:
        trace = Path(folder) / "prompts.jsonl"
        trace.write_text(prompts(context))
        none = Slo(1e9, 1e9)
        found = simulate(
            SimulationJob(trace=str(trace), slo=none, horizon_s=SECONDS[context], runs=runs), lambda done: None
        )
    figures = [LayoutFigures(one.throughput_tok_s, one.tpot_p50_ms, one.ttft_p50_s) for one in found]
    return {count: figures[at * len(layouts) :][: len(layouts)] for at, count in enumerate(concurrencies)}


def prompts(context: int) -> str:
    """Return a Mooncake trace of prompts that share nothing."""
    draw = random.Random(0)

    def around(mean: int) -> int:
        return int(mean * draw.uniform(1 - SPREAD, 1 + SPREAD))

    rows = [{"timestamp": 0, "input_length": around(context), "output_length": around(OUTPUT)} for _ in range(PROMPTS)]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def gains(figures: Sequence[LayoutFigures]) -> list[float]:
    """Return the throughput of every layout in relation to the first."""
    return [one.tokens_per_s / figures[0].tokens_per_s for one in figures]


def gains_row(context: int, concurrency: int, figures: Sequence[LayoutFigures]) -> str:
    """Return the row of one load: tok/s of the first layout, and the gains of the others."""
    others = [f"**{gain:.2f}x**" if gain >= RECOMMENDED else f"{gain:.2f}x" for gain in gains(figures)[1:]]
    return f"| {context:,} | {concurrency} | {figures[0].tokens_per_s:,.0f} | {' | '.join(others)} |"


def layout_rows(layouts: Sequence[Layout], served: Sequence[LayoutFigures], accept_length: float) -> list[str]:
    """Return a row for each layout at the load that is compared, in service and in lockstep."""
    context, concurrency = COMPARED
    fit = calibrate(Cluster())
    together = gains([in_lockstep(one, concurrency, context, accept_length, fit) for one in layouts])
    rows = []
    for one, figures, gain, locked in zip(layouts, served, gains(served), together, strict=True):
        speed = f"{figures.tokens_per_s:,.0f} | {figures.tpot_ms:.1f} | {figures.ttft_s:.1f} | {gain:.2f}x"
        lockstep = "" if one.delayed else f"{locked:.2f}x"
        rows.append(f"| {one.name} | {speed} | {lockstep} | {one.kv_tokens:,} |")
    return rows


def main(
    accept_length: float = typer.Option(2.7, "--accept-length", "-l", help="Tokens a verify step, at 3 draft steps."),
) -> None:
    """Compare the layouts by concurrency and context."""
    layouts = node_layouts()
    names = " | ".join(one.name for one in layouts[1:])
    typer.echo(f"| input | requests | {layouts[0].name}, tok/s | {names} |")
    for context in CONTEXTS:
        found = in_service(layouts, context, CONCURRENCIES, accept_length)
        for concurrency, figures in found.items():
            typer.echo(gains_row(context, concurrency, figures))
        if context == COMPARED[0]:
            compared = found[COMPARED[1]]
    typer.echo("\n| layout | tok/s | TPOT, ms | TTFT, s | gain | in lockstep | KV tokens |")
    typer.echo("\n".join(layout_rows(layouts, compared, accept_length)))


if __name__ == "__main__":
    run(lambda: typer.run(main))
