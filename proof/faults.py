"""Breaks `kimi-w4a8 serve tiny` in every way that docs/runbook.md lists, with real processes.

    python -m proof.faults [--list] [--only NAME ...] [--docs] [--from RUN]

Exit code 1 when an answer was wrong or shortened without an error, a request was lost that could have been saved, or
something was left behind. --docs: replace the rows of docs/runbook.md; rows of other cases stay as they are; with
--from they are those of an earlier run, and nothing is started.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from kimi_w4a8_eagle3.base.console import table_console
from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD, new_run_dir, record, write_json
from kimi_w4a8_eagle3.cli import run
from kimi_w4a8_eagle3.supervision.serve import signals_raise
from proof.fault_cases import CASES, port_taken
from proof.fault_stage import ARGUMENTS, FaultCase, FaultRow, FaultStage, small_disk
from proof.load.served import ServedEngine

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/runbook.md"
ROWS = ROOT / "proof/faults.json"
_BEGIN, _END = "<!-- faults: begin (proof/faults.py --docs) -->", "<!-- faults: end -->"


class Bench:
    """Runs cases; those that leave the server whole share one."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._stack = ExitStack()
        self._shared: FaultStage | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, case: FaultCase) -> FaultRow:
        """One case; what it raises is its problem and costs the shared server."""
        try:
            return self._run(case)
        except Exception as error:
            self._close_shared()
            return FaultRow(problems=[f"{type(error).__name__}: {error}"])

    def _run(self, case: FaultCase) -> FaultRow:
        if case.name == "port-taken":
            return port_taken(None, self._folder)
        if not case.own:
            return case.run(self._shared or self._open_shared())
        if case.name == "terminate" and self._shared is not None:
            row = case.run(self._shared)
            self._close_shared()
            return row
        self._close_shared()
        with ExitStack() as stack:
            place = self._folder / case.name
            if case.name == "disk-full":
                stack.enter_context(small_disk(place))
            return case.run(FaultStage(stack.enter_context(ServedEngine(place, ARGUMENTS)), self._folder))

    def _open_shared(self) -> FaultStage:
        self._console.print("the server starts")
        server = self._stack.enter_context(ServedEngine(self._folder / "server", ARGUMENTS))
        self._shared = FaultStage(server, self._folder)
        return self._shared

    def _close_shared(self) -> None:
        self._shared = None
        self._stack.close()


def main(
    only: list[str] = typer.Option([], "--only", help="Name of a case; may be given several times."),
    list_: bool = typer.Option(False, "--list", help="Print the cases."),
    docs: bool = typer.Option(False, "--docs", help="Write the rows of docs/runbook.md."),
    earlier: Path | None = typer.Option(None, "--from", help="Run directory whose rows --docs writes."),
    runs: Path = typer.Option(Path("runs"), "--runs", help="Where the run directory is created."),
) -> None:
    if list_:
        for case in CASES:
            typer.echo(f"{case.name:16} {case.title}")
        return
    if earlier is not None:
        found = json.loads((earlier / "result.json").read_text())
        _write_docs({name: row for name, row in found.items() if not only or name in only})
        return
    console = table_console()
    unknown = set(only) - {case.name for case in CASES}
    if unknown:
        raise KimiError(f"no such case: {', '.join(sorted(unknown))}", where="--only", remedy="see --list")
    folder = new_run_dir("faults", runs).resolve()
    write_json(folder / RECORD, record("faults", {}, {}))
    rows: dict[str, dict[str, Any]] = {}
    failed = False
    with signals_raise(), Bench(folder, console) as bench:
        for case in CASES:
            if only and case.name not in only:
                continue
            began = time.monotonic()
            row = bench.run(case)
            failed |= bool(row.problems)
            at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
            rows[case.name] = {"title": case.title, "at": at, "load_average": psutil.getloadavg()[0], **asdict(row)}
            write_json(folder / "result.json", rows)
            mark = "[red]✗[/]" if row.problems else "[green]✓[/]"
            console.print(f"{mark} {case.name}, {time.monotonic() - began:.0f} s: {row.clients}; {row.remark}")
            for problem in row.problems:
                console.print(f"    {problem}", style="red", markup=False)
    console.print(_table(rows))
    console.print(f"Everything is in {folder}")
    if docs:
        _write_docs(rows)
    raise typer.Exit(1 if failed else 0)


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table("fault", "clients saw", "noticed", "whole again", "left behind", "")
    for row in rows.values():
        mark = "✗" if row["problems"] else "✓"
        table.add_row(row["title"], row["clients"], _s(row["detected_s"]), _s(row["whole_s"]), row["left"], mark)
    return table


def _write_docs(rows: dict[str, dict[str, Any]]) -> None:
    """Merge the rows with those of earlier runs and put them between the markers of the page."""
    known = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    known |= rows
    kept = {case.name: known[case.name] for case in CASES if case.name in known}
    write_json(ROWS, kept)
    lines = ["| fault | clients saw | detected after | recovered after |", "|---|---|---|---|"]
    for row in kept.values():
        failed = "".join(f"; **FAILED: {problem[:200]}**" for problem in row["problems"])
        cells = [row["title"], row["clients"] + failed, _s(row["detected_s"]), _s(row["whole_s"])]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    page = DOCUMENT.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    DOCUMENT.write_text(before + "\n".join([_BEGIN, "", *lines, "", _END]) + after)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


if __name__ == "__main__":
    run(lambda: typer.run(main))
