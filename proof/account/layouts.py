"""`python -m proof.account.layouts`: layouts of one node with eight MI325X, by the fitted model and the plan.

A layout is a number of engines with as many GPUs each, which share the requests equally. The fit knows only published
figures of one engine on eight GPUs: its time per layer is taken for four GPUs, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_lab.predict.layouts import Layout, layout
from kimi_w4a8_lab.predict.machine_model import Cluster
from kimi_w4a8_lab.predict.predict import Fit, Load, calibrate, predict

LAYOUTS = (("agent",), ("agent-2x4",), ("throughput",), ("throughput", "dp-size=2"))  # recipes with settings
CONCURRENCIES, CONTEXTS, OUTPUT = (2, 8, 40, 64), (2048, 10240, 65536), 512


@dataclass(frozen=True)
class LayoutFigures:
    """Figures of a node: throughput of all engines, TPOT and TTFT of a request."""

    tokens_per_s: float
    tpot_ms: float
    ttft_s: float


def figures(chosen: Layout, concurrency: int, context: int, accept_length: float, fit: Fit) -> LayoutFigures:
    """Return the figures of `concurrency` requests of `context` input tokens on a node."""
    load = Load(concurrency // chosen.engines, context, OUTPUT, steps=3, accept_length=accept_length)
    rate, tpot, ttft = (
        predict(load, key, fit, chosen.cluster)
        for key in ("output_throughput_tok_s", "tpot_median_ms", "ttft_median_ms")
    )
    return LayoutFigures(chosen.engines * rate, tpot, ttft / 1000)


def main(
    accept_length: float = typer.Option(2.7, "--accept-length", "-l", help="Tokens a verify step, at 3 draft steps."),
) -> None:
    """Compare the layouts by concurrency and context."""
    fit, (one, *others) = calibrate(Cluster()), [layout(*names) for names in LAYOUTS]
    columns = "recipe", "engines", "concurrency", "input", "tok/s", "TPOT", "TTFT", "KV tokens", "resident", "gain"
    table = Table(*columns, title=f"one node with 8 MI325X, accept length {accept_length}, by the model")
    for context in CONTEXTS:
        for concurrency in CONCURRENCIES:
            base = figures(one, concurrency, context, accept_length, fit)
            for chosen in (one, *others):
                found = figures(chosen, concurrency, context, accept_length, fit)
                load = chosen.name, str(concurrency), f"{context:,}"
                speed = f"{found.tokens_per_s:,.0f}", f"{found.tpot_ms:.1f} ms", f"{found.ttft_s:.1f} s"
                resident = str(chosen.kv_tokens // (context + OUTPUT))
                gain = "" if chosen is one else f"{found.tokens_per_s / base.tokens_per_s:.2f}x"
                table.add_row(chosen.recipe, *load, *speed, f"{chosen.kv_tokens:,}", resident, gain)
    table_console().print(table)


if __name__ == "__main__":
    run(lambda: typer.run(main))
