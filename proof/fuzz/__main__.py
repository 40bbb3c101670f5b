"""Fuzz a real server: no request may end it, get a 5xx, open a closed endpoint, or disturb another client.

    python -m proof.fuzz [--batches 1000] [--seed 1] [--url http://HOST:PORT]

Starts the built-in model with a client's and an operator's key, or uses the server at --url, whose keys are read from
KIMI_API_KEY(_FILE) and KIMI_ADMIN_KEY(_FILE). The exit code is 1 when something was found. The folder then holds the
smallest requests that hypothesis found, with the commands that send them again. The next run sends them first.
"""

from __future__ import annotations

import os
import secrets
import signal
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
from kimi_w4a8_eagle3.recipe.launch import load_recipe, render

from .run import NO_KERNEL_CACHE, Fuzz, FuzzTarget

_CLASSES = (("2xx", 200, 299), ("4xx", 400, 499), ("5xx", 500, 599), ("none", 0, 0))


def main(
    batches: int = typer.Option(1000, min=1, help="Batches to draw, of up to eight requests at once."),
    seed: int = typer.Option(1, help="The same seed draws the same requests."),
    url: str = typer.Option("", help="A server that runs already, instead of the built-in model's."),
    runs: Path = typer.Option(DEFAULT_ROOT, help="Folder of the run directories."),
) -> None:
    """Fuzz, print a table by group, exit 1 when something was found."""
    console, folder = Console(), new_run_dir("fuzz", runs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # every `with` block cleans up
    with _server(url.rstrip("/"), folder, console) as target:
        fuzz = Fuzz(target, folder, seed, DirectoryBasedExampleDatabase(runs / ".fuzz"))
        faults = fuzz.run(batches)
    table = Table(title=f"{fuzz.statuses.total()} requests, seed {seed}")
    for column in ("group", *(name for name, _, _ in _CLASSES)):
        table.add_column(column, justify="left" if column == "group" else "right")
    for group in sorted({group for group, _ in fuzz.statuses}):
        found = {status: count for (name, status), count in fuzz.statuses.items() if name == group}
        counts = (sum(found[status] for status in found if low <= status <= high) for _, low, high in _CLASSES)
        table.add_row(group, *(str(count or "") for count in counts))
    console.print(table)
    for fault in faults:
        console.print(f"[red]✗[/] {escape(fault)}", soft_wrap=True)
    console.print(f"fuzz: {folder}" if faults else "[green]✓ nothing ended, opened, stalled or was kept[/]")
    raise typer.Exit(1 if faults else 0)


@contextmanager
def _server(url: str, folder: Path, console: Console) -> Iterator[FuzzTarget]:
    if url:
        settings = read_door(os.environ)
        yield FuzzTarget(url, api_key=settings.api_key, admin_key=settings.admin_key)
        return
    launch = render(load_recipe("tiny"), [f"port={free_port()}", "context-length=8192", NO_KERNEL_CACHE])
    write_json(folder / RECORD, record("fuzz", {launch.name: {"argv": launch.argv, "env": launch.env}}, launch.env))
    keys = {API_KEY: secrets.token_urlsafe(), ADMIN_KEY: secrets.token_urlsafe()}
    environ = {**launch.env, **keys, "KIMI_DOOR_NATIVE": "open"}  # what an operator may open must hold, too
    with EngineServer(launch.argv, environ, launch.host, launch.port, folder / "server.log") as server:
        console.print(f"fuzz: the server was ready after {server.wait_ready(300.0):.0f} s at {server.base_url}")
        yield FuzzTarget(server.base_url, server.pid, keys[API_KEY], keys[ADMIN_KEY], lambda: server.poll() is not None)


if __name__ == "__main__":
    run(lambda: typer.run(main))
