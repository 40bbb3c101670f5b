"""`kimi report`: a page to look at, from run directories of `kimi bench`."""

from __future__ import annotations

from pathlib import Path

import typer


def report(
    runs: list[Path] = typer.Argument(help="Run directories of `kimi bench`, from this machine or another."),
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Folder of the report; default: `report` in the last run."
    ),
) -> None:
    """Write one self-contained HTML page and PNG figures from finished benchmark runs."""
    from ..bench.runs import read_run
    from ..report.page import write_report

    page = write_report([read_run(run) for run in runs], out or runs[-1] / "report")
    typer.echo(f"kimi: report: {page}")
