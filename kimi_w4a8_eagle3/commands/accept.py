"""`kimi-w4a8 accept`: checks on a machine with GPUs that cannot run without them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from ..base.console import table_console
from ..base.run_dir import RECORD, record, write_json
from ..bench.single import Texts
from ..door.settings import client_key
from ..machine.hardware import Machine
from .eval import require_packages
from .options import RUNS, signals

_STYLES = {"passed": "green", "failed": "bold red", "not run": "dim"}


def accept(
    recipe: list[str] = typer.Option(
        [], "--recipe", "-r", help="May be repeated; default: the MI325X recipes, without GPUs also the built-in model."
    ),
    quick: bool = typer.Option(False, "--quick", help="A few prompts per stage: a test run without figures."),
    restart: bool = typer.Option(False, "--restart", help="Start a new run instead of resuming the last one."),
    sharegpt: str = typer.Option("", "--sharegpt", help="ShareGPT JSON file to send; default: fetched from the Hub."),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="GSM8K: train.jsonl and test.jsonl (no Hub)."),
    runs: Path = RUNS,
) -> None:
    """Prove on this machine what is not proved yet: checks, kernels, speed, answers; one page, one bundle.

    The run stops at the first stage that fails and prints a remedy. The same command resumes there.
    """
    require_packages()
    from ..accept import claims, journal, stages  # optional: aiohttp

    machine = Machine.detect()
    sizes = stages.QUICK if quick else stages.Sizes()
    recipes = recipe or [*stages.ON_GPUS, *([] if machine.devices else ["tiny"])]
    texts, console = Texts(sharegpt=sharegpt or None), table_console()
    folder, found = journal.open_journal(runs, str(sizes), restart)
    write_json(folder / RECORD, record(journal.KIND, {}, {}, gpus=[asdict(device) for device in machine.devices]))
    console.print(f"kimi-w4a8 accept: results are kept in {folder}")
    run = stages.Trial(folder, recipes, sizes, console, texts, data_dir, client_key(None, os.environ), machine)
    todo = run.stages()
    try:
        with signals(runs):
            try:
                journal.run_stages(todo, found, folder, console.print)
            finally:
                run.stop()
    finally:
        table = Table("stage", "state", "s", "found", title="kimi-w4a8 accept", title_style="bold")
        for name, outcome in found.outcomes.items():
            state = f"[{_STYLES[outcome.state]}]{outcome.state}[/]"
            table.add_row(name, state, f"{outcome.seconds:.0f}", escape(outcome.found.partition("\n")[0]))
        console.print(table)
        page = claims.write_page(todo, found, folder)
        console.print(f"page: {page}\nbundle: {claims.write_bundle(folder)}", markup=False)
