"""Does a request end the engine, get a 5xx, or disturb another client? Fuzzes the built-in model's real server.

    python bench/fuzz_api.py [--minutes 5] [--seed 1] [--url http://HOST:PORT]

Starts the tiny recipe, or uses the engine at --url. Exit code 1 when something was found; the folder then holds the
requests, and fuzz.json the commands that send them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kimi_w4a8_eagle3.errors import KimiError
from kimi_w4a8_eagle3.fuzz.session import Fuzz, Outcome
from kimi_w4a8_eagle3.recipes import Launch, load_recipe, render
from kimi_w4a8_eagle3.run_dir import DEFAULT_ROOT, RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.server import EngineServer, free_port

_READY_S = 300.0
_SHOWN = 20
_CLASSES = (("2xx", 200, 299), ("4xx", 400, 499), ("5xx", 500, 599), ("none", 0, 0))


def main(
    minutes: float = typer.Option(5.0, min=0.05, help="How long to send."),
    seed: int = typer.Option(1, help="The same seed draws the same requests in the same order."),
    url: str = typer.Option("", help="An engine that runs already, instead of the built-in model's."),
    runs: Path = typer.Option(DEFAULT_ROOT, help="Where the run's folder goes."),
) -> None:
    """Fuzz, print a table by endpoint and status, exit 1 when something was found."""
    console = Console()
    try:
        folder = new_run_dir("fuzz", runs)
        with _engine(url, folder, console) as server:
            base_url = url.rstrip("/") or server.base_url if server else url.rstrip("/")
            fuzz = Fuzz(base_url, folder, seed, (lambda: server.poll() is not None) if server else (lambda: False))
            with console.status("fuzzing") as status:
                outcome = fuzz.run(minutes * 60, lambda now: status.update(f"{now.requests} requests"))
    except KimiError as error:
        console.print(f"[red]fuzz:[/] {escape(str(error))}")
        raise typer.Exit(error.exit_code) from None
    write_json(folder / "fuzz.json", {"minutes": minutes, "seed": seed, **outcome.summary()})
    _show(outcome, console)
    console.print(f"fuzz: {folder}")
    raise typer.Exit(1 if outcome.faults else 0)


@contextmanager
def _engine(url: str, folder: Path, console: Console) -> Iterator[EngineServer | None]:
    if url:
        write_json(folder / RECORD, record("fuzz", {}, {}, url=url))
        yield None
        return
    launch: Launch = render(load_recipe("tiny"), [f"port={free_port()}"])
    write_json(folder / RECORD, record("fuzz", {launch.name: {"argv": launch.argv, "env": launch.env}}, launch.env))
    with EngineServer(launch.argv, launch.env, launch.host, launch.port, folder / "server.log") as server:
        console.print(f"fuzz: the engine was ready after {server.wait_ready(_READY_S):.0f} s at {server.base_url}")
        yield server


def _show(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"{outcome.requests} requests")
    for column in ("endpoint", *(name for name, _, _ in _CLASSES)):
        table.add_column(column, justify="left" if column == "endpoint" else "right")
    for endpoint in sorted({endpoint for endpoint, _ in outcome.statuses}):
        cells = []
        for _, low, high in _CLASSES:
            found = {s: n for (e, s), n in outcome.statuses.items() if e == endpoint and low <= s <= high}
            detail = ", ".join(f"{status}: {count}" for status, count in sorted(found.items()))
            cells.append(detail if low else str(found.get(0, "")))
        table.add_row(escape(endpoint), *cells)
    console.print(table)
    healthy = outcome.summary()["healthy_client"]
    console.print(f"healthy client: {healthy}")
    for fault in outcome.faults[:_SHOWN]:
        console.print(f"[red]{escape(fault.what)}[/] {escape(fault.endpoint)} {escape(fault.detail[:300])}")
        console.print(escape(fault.command), style="dim", soft_wrap=True)
    if len(outcome.faults) > _SHOWN:
        console.print(f"... and {len(outcome.faults) - _SHOWN} more in fuzz.json")
    console.print("[red]✗ faults[/]" if outcome.faults else "[green]✓ no crash, no hang, no 5xx; nobody noticed[/]")


if __name__ == "__main__":
    typer.run(main)
