"""`python -m proof.account.layouts`: layouts of one node with eight MI325X, as rows of docs/perf/machine-model.md.

Equal requests start together, as in benchmarks, and are priced by the formulas of `bench predict`. The fit knows only
published figures of one engine on eight GPUs. Staggered requests gain less with DP attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer

from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.predict.layouts import Layout, node_layouts
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Fit, Load, calibrate, predict

CONCURRENCIES, CONTEXTS, OUTPUT = (2, 8, 40), (2048, 10240, 65536), 512


@dataclass(frozen=True)
class LayoutFigures:
    """Throughput of a node, TPOT and TTFT of a request."""

    tokens_per_s: float
    tpot_ms: float
    ttft_s: float


def in_lockstep(chosen: Layout, concurrency: int, context: int, accept_length: float, fit: Fit) -> LayoutFigures:
    """Return the figures of `concurrency` equal requests of `context` input tokens that start together."""
    load = Load(concurrency, context, OUTPUT, steps=3, accept_length=accept_length)
    rate, tpot, ttft = (
        predict(load, key, fit, chosen.cluster)
        for key in ("output_throughput_tok_s", "tpot_median_ms", "ttft_median_ms")
    )
    return LayoutFigures(rate, tpot, ttft / 1000)


def rows(layouts: list[Layout], accept_length: float) -> list[str]:
    """Return a row for each load: tok/s of the first layout, and the gains of the others."""
    fit, found = calibrate(Cluster()), []
    for context in CONTEXTS:
        for concurrency in CONCURRENCIES:
            first, *others = (
                in_lockstep(one, concurrency, context, accept_length, fit).tokens_per_s for one in layouts
            )
            gains = " | ".join(f"{other / first:.2f}x" for other in others)
            found.append(f"| {context:,} | {concurrency} | {first:,.0f} | {gains} |")
    return found


def main(
    accept_length: float = typer.Option(2.7, "--accept-length", "-l", help="Tokens a verify step, at 3 draft steps."),
) -> None:
    """Compare the layouts by concurrency and context."""
    layouts = node_layouts()
    typer.echo(f"| input | requests | {layouts[0].name}, tok/s | {' | '.join(one.name for one in layouts[1:])} |")
    typer.echo("\n".join(rows(layouts, accept_length)))
    typer.echo(f"KV tokens: {', '.join(f'{one.name} {one.kv_tokens:,}' for one in layouts)}")


if __name__ == "__main__":
    run(lambda: typer.run(main))
