"""Check that structured answers are valid, and the same with EAGLE3 as without, on two real servers.

    python -m proof.structured [--cases 500] [--seed 1] [--concurrency 8]

Starts the built-in model with EAGLE3 and then without, each with Kimi's parsers; sends each case to both. Exit code 1
when an answer is wrong or differs, or when a schema that nothing can follow is not refused; the folder holds all.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.fleet.serve import Terminated, signals_raise
from kimi_w4a8_lab.base.server_under_test import Target
from proof.structured.ask import Asker, StructuredVerdict, compare, refusals
from proof.structured.cases import FORMS, StructuredAnswer, StructuredCase, cases

_SHOWN = 20


def main(
    count: int = typer.Option(500, "--cases", min=1, help="How many cases."),
    seed: int = typer.Option(1, help="The same seed asks the same."),
    concurrency: int = typer.Option(8, min=1, help="Requests at a time."),
    runs: Path = typer.Option(DEFAULT_ROOT, help="Where the run's folder goes."),
) -> None:
    """Ask, judge, print a table by form, exit 1 when something was found."""
    console = Console()
    try:
        folder = new_run_dir("structured", runs)
        write_json(folder / RECORD, record("structured", {}, {}, cases=count, seed=seed, concurrency=concurrency))
        with signals_raise():
            asked, found, faults = _side(folder, "tiny", count, seed, concurrency, console)
            _, expected, more = _side(folder, "tiny:plain", count, seed, concurrency, console)
    except Terminated as stopped:
        console.print(f"structured: {stopped} received; no verdict")
        raise typer.Exit(stopped.exit_code) from None
    verdicts = compare(asked, expected, found)
    faults = faults + more + [f"{verdict.case.name}: {verdict.fault}" for verdict in verdicts if verdict.fault]
    write_json(folder / "structured.json", {"faults": faults, "cases": [asdict(verdict) for verdict in verdicts]})
    _show(verdicts, console)
    for fault in faults[:_SHOWN]:
        console.print(f"[red]✗[/] {escape(fault)}", soft_wrap=True)
    console.print("[red]✗ faults[/]" if faults else "[green]✓ every complete answer valid, and the same with EAGLE3[/]")
    console.print(f"structured: {folder}")
    raise typer.Exit(1 if faults else 0)


def _side(
    folder: Path, recipe: str, count: int, seed: int, concurrency: int, console: Console
) -> tuple[list[StructuredCase], list[StructuredAnswer], list[str]]:
    """One server's answers, and what it did wrong with schemas that nothing can follow."""
    began, target = time.monotonic(), Target(recipe=recipe)
    log = folder / f"{recipe.replace(':', '-')}.log"
    with target.running(log, console.print) as server, Asker(server.base_url) as asker:
        asked = cases(count, seed, asker.model)
        answered = asker.all(asked, concurrency)
        faults = [f"{server.name}: {refusal}" for refusal in refusals(asker)]
    console.print(f"structured: {server.name}: {count} cases in {time.monotonic() - began:.0f} s with its start")
    return asked, answered, faults


def _show(verdicts: list[StructuredVerdict], console: Console) -> None:
    table = Table(title=f"{len(verdicts)} cases")
    for column in ("form", "thinking", "asked", "complete, valid", "cut by the limit", "wrong"):
        table.add_column(column, justify="left" if column in ("form", "thinking") else "right")
    for form in FORMS:
        for thinking in (False, True):
            rows = [verdict for verdict in verdicts if verdict.case.form == form and verdict.case.thinking == thinking]
            complete = sum(verdict.answer.complete and not verdict.fault for verdict in rows)
            cut = sum(not verdict.answer.complete for verdict in rows)
            wrong = sum(bool(verdict.fault) for verdict in rows)
            numbers = (len(rows), complete, cut, wrong)
            table.add_row(form, "yes" if thinking else "no", *map(str, numbers))
    console.print(table)


if __name__ == "__main__":
    run(lambda: typer.run(main))
