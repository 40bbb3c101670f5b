"""`kimi-w4a8 rank`: ranked layouts for recorded traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from kimi_w4a8_eagle3.base.console import table_console

from ..base.request_progress import request_progress
from ..predict.layouts import node_layouts
from ..predict.simulation import Slo
from ..predict.trace_plan import MODEL, plan_trace, user_counts, variations
from ..report import traffic_plan
from ..report.page import Table, require_place, write_page
from ..report.tables import print_table


def rank(
    trace: Path = typer.Argument(
        ..., metavar="TRACE", help="Recorded traffic: agentic-trace, AgentX, Mooncake, or a run."
    ),
    limits: str = typer.Option(..., "--slo", help="Latency limits, such as ttft=2s,tpot=40ms."),
    users: int | None = typer.Option(
        None, "--users", min=1, max=10_000, help="Sessions at once; default: recorded times, or the most that fit."
    ),
    accept_length: float = typer.Option(
        2.7, "--accept-length", "-l", min=1, max=4, help="Tokens that a verify step accepts."
    ),
    minutes: float = typer.Option(10.0, "--minutes", min=1, max=10_000, help="Simulated time."),
    lockstep: bool = typer.Option(False, "--lockstep", help="Start all users at once, as benchmarks do."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the page to this folder."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Rank layouts for recorded traffic and limits, by simulation.

    The layouts are of 8x MI325X, and the limits are of latency.
    """
    slo = Slo.parse(limits)
    if output:
        require_place(output)
    console, layouts = table_console(), node_layouts()
    simulations = len(layouts) * (len(user_counts(users)) + len(variations(0.0, accept_length)))
    with request_progress("simulations", simulations, console) as show:
        plan = plan_trace(trace, slo, users, accept_length, minutes * 60, show, layouts, lockstep)

    if as_json:
        content: dict[str, Any] = {"about": MODEL, "verdict": plan.verdict, "users": plan.users}
        content |= {"reasons": plan.reasons(), "command": plan.winner.command if plan.winner else None}
        content |= {"error": plan.error, "notes": traffic_plan.notes(plan)}
        content |= {"layouts": {name: [one.model_dump() for one in plan.chosen[name]] for name in plan.ranking}}
        content |= {"curves": {name: [one.model_dump() for one in found] for name, found in plan.curves.items()}}
        typer.echo(json.dumps(content, indent=2))
        return
    console.print(MODEL, markup=False)
    print_table(Table(traffic_plan.COLUMNS, traffic_plan.rows(plan), f"{plan.trace.name}, {plan.job.slo}"), console)
    for line in (*traffic_plan.notes(plan), f"verdict: {plan.verdict}", *plan.reasons()):
        console.print(line, markup=False)
    if output is not None:
        typer.echo(f"page: {write_page(traffic_plan.page(plan), output)}")
