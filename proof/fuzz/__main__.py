"""Fuzz a real server: no request may end it, get a 5xx, open a closed endpoint, or disturb another client.

    python -m proof.fuzz [--minutes 5 | --requests 10000] [--seed 1] [--url http://HOST:PORT]

Starts the built-in model with a client's and an operator's key, or uses the engine at --url, whose keys are read from
KIMI_API_KEY(_FILE) and KIMI_ADMIN_KEY(_FILE). The exit code is 1 when something was found. The folder then holds the
requests, made as small as possible, and fuzz.json the commands that send them again. The next run sends them first.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from hypothesis.database import DirectoryBasedExampleDatabase
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kimi_w4a8_eagle3.base.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.door.settings import ADMIN_KEY, API_KEY, read_door
from kimi_w4a8_eagle3.engine.process import EngineServer, free_port
from kimi_w4a8_eagle3.fleet.serve import Terminated, signals_raise
from kimi_w4a8_eagle3.recipe.launch import Launch, load_recipe, render
from proof.fuzz.resources import NO_KERNEL_CACHE
from proof.fuzz.session import Fuzz, FuzzOutcome, FuzzTarget

_READY_S = 300.0
_SHOWN = 20
_CLASSES = (("2xx", 200, 299), ("4xx", 400, 499), ("5xx", 500, 599), ("none", 0, 0))


def main(
    minutes: float = typer.Option(5.0, min=0.05, help="How long to send."),
    requests: int = typer.Option(0, min=0, help="How many to send, instead of a time."),
    seed: int = typer.Option(1, help="The same seed sends the same requests."),
    url: str = typer.Option("", help="An engine that runs already, instead of the built-in model's."),
    runs: Path = typer.Option(DEFAULT_ROOT, help="Where the run's folder goes."),
) -> None:
    """Fuzz, print a table by group, exit 1 when something was found."""
    console = Console()
    try:
        folder = new_run_dir("fuzz", runs)
        with signals_raise(), _engine(url.rstrip("/"), folder, console) as target:
            examples = DirectoryBasedExampleDatabase(runs / ".fuzz")
            fuzz = Fuzz(target, folder, seed, timely=True, examples=examples)
            try:
                with console.status("fuzzing") as status:
                    outcome = fuzz.run(
                        requests or None,
                        None if requests else minutes * 60,
                        lambda now: status.update(f"{now.requests} requests, {len(now.faults)} faults"),
                    )
            finally:  # what was found until a signal came, too
                write_json(folder / "fuzz.json", {"seed": seed, **fuzz.outcome.summary()})
    except Terminated as stopped:
        console.print(f"fuzz: {stopped} received; no verdict, but what was found until then: {folder / 'fuzz.json'}")
        raise typer.Exit(stopped.exit_code) from None
    _show(outcome, seed, console)
    console.print(f"fuzz: {folder}")
    raise typer.Exit(1 if outcome.faults else 0)


@contextmanager
def _engine(url: str, folder: Path, console: Console) -> Iterator[FuzzTarget]:
    if url:
        write_json(folder / RECORD, record("fuzz", {}, {}, url=url))
        settings = read_door(os.environ)
        yield FuzzTarget(url, api_key=settings.api_key, admin_key=settings.admin_key)
        return
    launch: Launch = render(load_recipe("tiny"), [f"port={free_port()}", "context-length=8192", NO_KERNEL_CACHE])
    write_json(folder / RECORD, record("fuzz", {launch.name: {"argv": launch.argv, "env": launch.env}}, launch.env))
    keys = {API_KEY: secrets.token_urlsafe(), ADMIN_KEY: secrets.token_urlsafe()}
    opened = {"KIMI_DOOR_NATIVE": "open"}  # what an operator may open must hold, too
    environment = {**launch.env, **keys, **opened}
    with EngineServer(launch.argv, environment, launch.host, launch.port, folder / "server.log") as server:
        console.print(f"fuzz: the engine was ready after {server.wait_ready(_READY_S):.0f} s at {server.base_url}")
        yield FuzzTarget(server.base_url, server.pid, keys[API_KEY], keys[ADMIN_KEY], lambda: server.poll() is not None)


def _show(outcome: FuzzOutcome, seed: int, console: Console) -> None:
    table = Table(title=f"{outcome.requests} requests, seed {seed}")
    for column in ("group", "sent", *(name for name, _, _ in _CLASSES), "slowest", ""):
        table.add_column(column, justify="left" if column in ("group", "") else "right")
    for name, row in sorted(outcome.rows.items()):
        counts = [str(row.between(low, high) or "") for _, low, high in _CLASSES]
        seconds, case = row.slowest
        table.add_row(name, str(row.statuses.total()), *counts, f"{seconds:.1f} s", escape(case[:60]))
    console.print(table)
    console.print(f"healthy client: {outcome.summary()['healthy_client']}")
    console.print(f"held before: {outcome.before}\nheld after:  {outcome.after}")
    for fault in list(outcome.faults.values())[:_SHOWN]:
        where = escape(f"{fault.group} {fault.name}: {fault.detail[:300]}")
        console.print(f"[red]{escape(fault.what)}[/] x{fault.times} {where}")
        console.print(escape(fault.command), style="dim", soft_wrap=True)
    if len(outcome.faults) > _SHOWN:
        console.print(f"... and {len(outcome.faults) - _SHOWN} more in fuzz.json")
    found = "[red]✗ faults[/]" if outcome.faults else "[green]✓ nothing ended, opened, stalled or was kept[/]"
    console.print(found)


if __name__ == "__main__":
    run(lambda: typer.run(main))
