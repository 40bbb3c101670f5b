"""`kimi-w4a8 accept`: checks on a machine with GPUs that cannot run without them."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from ..base.console import table_console
from ..base.run_dir import RECORD, record, write_json
from ..bench.single import Texts
from ..door.settings import client_key
from ..machine.hardware import Machine
from ..report.page import write_page
from .eval import require_packages
from .options import RUNS, signals


def accept(
    recipe: list[str] = typer.Option(
        [], "--recipe", "-r", help="May be repeated; the first one is tested most. Default: agent; without GPUs: tiny."
    ),
    full: bool = typer.Option(
        False, "--full", help="Also the download, kernels, tiles, GSM8K, chat, and the recipes of the articles: hours."
    ),
    quick: bool = typer.Option(False, "--quick", help="A few prompts per stage: a test run without figures."),
    restart: bool = typer.Option(False, "--restart", help="Start a new run instead of resuming the last one."),
    sharegpt: str = typer.Option("", "--sharegpt", help="ShareGPT JSON file to send; default: fetched from the Hub."),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="GSM8K: train.jsonl and test.jsonl (no Hub)."),
    runs: Path = RUNS,
) -> None:
    """Accept what this machine serves, in an hour on eight MI325X: a timetable, the stages, a page and a bundle.

    A stage that fails is recorded, and the others go on. The same command runs only what has not passed.
    """
    require_packages()
    from ..accept import claims, journal, stages  # optional: aiohttp

    machine = Machine.detect()
    sizes = replace(stages.QUICK if quick else stages.Sizes(), full=full)
    recipes = recipe or (list(stages.ON_GPUS if full else stages.ON_GPUS[:1]) if machine.devices else ["tiny"])
    texts, console = Texts(sharegpt=sharegpt or None), table_console()
    folder, found = journal.open_journal(runs, f"{sizes} {' '.join(recipes)}", restart)
    write_json(folder / RECORD, record(journal.KIND, {}, {}, gpus=[asdict(device) for device in machine.devices]))
    run = stages.AcceptRun(folder, recipes, sizes, console, texts, data_dir, client_key(None, os.environ), machine)
    todo = run.stages()
    console.print(f"kimi-w4a8 accept: results are kept in {folder}")
    try:
        with signals(runs):
            try:
                journal.run_stages(todo, found, folder, console.print)
            finally:
                run.stop()
    finally:
        table = Table("stage", "verdict", "s", "found", title=escape(found.headline(todo)), title_style="bold")
        for name, result in found.results.items():
            table.add_row(
                name, claims.shown(result.verdict).text, f"{result.seconds:.0f}", escape(result.found.split("\n")[0])
            )
        console.print(table)
        console.print(
            f"page: {write_page(claims.page(todo, found), folder)}\nbundle: {claims.write_bundle(folder)}", markup=False
        )
