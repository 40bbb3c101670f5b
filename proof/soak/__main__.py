"""Look for leaks and lost tokens of a fleet. Mixed load for minutes or hours, everything sampled, a verdict.

    python -m proof.soak [--minutes 20] [--replicas 2] [--concurrency 8] [--seed 7] [--url http://HOST:PORT]

Starts `kimi-w4a8 serve --recipe tiny --replicas N`, or uses the fleet at --url. Exit code 1 when something was found.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import typer
from rich.markup import escape
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.finding import Finding, checked
from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.fleet.serve import Terminated, signals_raise
from proof.load.load import write_records
from proof.load.served import ServedFleet
from proof.soak.findings import Bounds, outcomes
from proof.soak.processes import serving_process
from proof.soak.soak import Soak, SoakPlan, judge, soak

_START_TIMEOUT_S = 900.0


def main(
    minutes: float = typer.Option(20.0, min=0.5, help="Of load; start and rest come on top."),
    replicas: int = typer.Option(2, min=2, help="Engines behind the router."),
    concurrency: int = typer.Option(8, min=2, help="Clients at a time; one of them reads slowly."),
    seed: int = typer.Option(7, help="Of questions, their order, and when clients leave."),
    url: str = typer.Option(None, help="A fleet that runs already, instead of one started here."),
    ops_url: str = typer.Option(None, help="Its probes and metrics; default: --url with the next port."),
    recipe: str = typer.Option("tiny", help="Served when no --url is given."),
    sets: list[str] = typer.Option([], "--set", help="KEY=VALUE for the fleet started here, as for kimi-w4a8 serve."),
    runs: Path = typer.Option(DEFAULT_ROOT, help="Where the run folder is made."),
) -> None:
    """Soak, judge."""
    console = table_console()
    folder = new_run_dir("soak", runs).resolve()
    bounds, plan = Bounds(), SoakPlan(minutes, concurrency, seed)
    facts = {
        "plan": asdict(plan),
        "bounds": asdict(bounds),
        "url": url,
        "recipe": recipe,
        "set": sets,
        "replicas": replicas,
    }
    write_json(folder / RECORD, record("soak", {}, {}, **facts))
    console.print(f"soak: everything is in {folder}")
    left = list[Finding]()
    try:
        with signals_raise(), console.status("start") as status:
            say = status.update
            if url is not None:
                url, parts = url.rstrip("/"), urlsplit(url)
                ops_url = ops_url or f"{parts.scheme}://{parts.hostname}:{(parts.port or 80) + 1}"
                found = soak(url, ops_url, serving_process(url), folder, plan, say)
            else:
                arguments = [word for setting in sets for word in ("--set", setting)]
                with ServedFleet(folder, replicas, arguments, recipe) as fleet:
                    fleet.wait_whole(_START_TIMEOUT_S)
                    root = psutil.Process(fleet.process.pid)
                    found = soak(fleet.base_url, fleet.ops_url, root, folder, plan, say)
                    say("the fleet is stopped")
                    fleet.stop(signal.SIGTERM)
                    still_there = fleet.leftovers()
                left = [checked("nothing is left after the end", str(still_there), "", not still_there)]
    except Terminated as stopped:
        console.print(f"soak: {stopped} received; no verdict")
        raise typer.Exit(stopped.exit_code) from None
    findings = [*judge(found, bounds), *left]
    write_records(folder / "requests.jsonl", found.records)
    write_json(folder / "soak.json", _result(found, findings))
    console.print(_served(found), _findings(findings))
    failed = [finding for finding in findings if not finding.passed]
    console.print("[green]✓ nothing leaks, nothing is lost[/]" if not failed else f"[red]✗ {len(failed)} findings[/]")
    raise typer.Exit(1 if failed else 0)


def _served(found: Soak) -> Table:
    table = Table(title="What the clients saw")
    for column in ("client", "requests", "outcomes"):
        table.add_column(column, justify="right" if column == "requests" else "left")
    for manner, counts in outcomes(found.records).items():
        table.add_row(manner, f"{counts.total():,}", ", ".join(f"{n:,} {name}" for name, n in counts.most_common()))
    return table


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(title="Findings")
    for column in ("", "what", "detail"):
        table.add_column(column)
    for finding in findings:
        table.add_row("[green]✓" if finding.passed else "[red]✗", finding.name, escape(finding.found))
    return table


def _result(found: Soak, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "passed": all(finding.passed for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "began": found.began,
        "ended": found.ended,
        "outcomes": outcomes(found.records),
        "before": asdict(found.before),
        "after": asdict(found.after),
    }


if __name__ == "__main__":
    run(lambda: typer.run(main))
