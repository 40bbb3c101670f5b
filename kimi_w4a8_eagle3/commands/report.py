"""`kimi-w4a8 report`: an HTML page from run directories of `kimi-w4a8 bench` and `kimi-w4a8 eval`."""

from __future__ import annotations

from pathlib import Path

import typer

from ..bench.runs import read_run
from ..eval.section import PAGE, append_sections, is_evaluation, write_pages
from ..report.analysis import Analysis
from ..report.measured import page as measured_page
from ..report.page import write_page


def report(
    runs: list[Path] = typer.Argument(help="Run directories of `kimi-w4a8 bench` or `eval`, from any machine."),
    out: Path | None = typer.Option(
        None, "--output", "-o", help="Folder of the report; default: `report` in the last run."
    ),
) -> None:
    """Write one self-contained HTML page and SVG figures from finished benchmark and evaluation runs."""
    folder = out or runs[-1] / "report"
    evaluations = [run for run in runs if is_evaluation(run)]
    measured = [run for run in runs if run not in evaluations]
    if measured:
        found = write_page(measured_page(Analysis([read_run(run) for run in measured])), folder)
        page = append_sections(found, evaluations)
    else:
        page = write_pages(evaluations, folder / PAGE)
    typer.echo(f"kimi-w4a8: report: {page}")
