"""`kimi-w4a8 report`: an HTML page from run directories of `kimi-w4a8 bench` and `kimi-w4a8 eval`."""

from __future__ import annotations

from pathlib import Path

import typer

from ..bench.runs import read_run
from ..report import evaluation
from ..report import measured as speed
from ..report.analysis import Analysis
from ..report.page import joined, write_page


def report(
    runs: list[Path] = typer.Argument(help="Run directories of `kimi-w4a8 bench` or `eval`, from any machine."),
    out: Path | None = typer.Option(None, "--output", "-o", help="Folder; default: `report` in the last run."),
) -> None:
    """Write one self-contained HTML page and SVG figures from finished benchmark and evaluation runs."""
    folder = out or runs[-1] / "report"
    measured = [run for run in runs if not evaluation.is_evaluation(run)]
    pages = [speed.page(Analysis([read_run(run) for run in measured]))] if measured else []
    pages += [evaluation.page(run) for run in runs if run not in measured]
    typer.echo(f"page: {write_page(joined(pages), folder)}")
