"""`kimi-w4a8 report`: an HTML page from run directories of `bench`, `eval` and `accept`."""

from __future__ import annotations

from pathlib import Path

import typer

from kimi_w4a8_eagle3.base.errors import KimiError

from ..accept import claims
from ..accept.journal import AcceptResult
from ..accuracy.results import RESULTS, EvalResult
from ..base.run_folder import RunFolder
from ..report import evaluation, measured
from ..report.analysis import Analysis
from ..report.page import Page, joined, unreadable, write_page
from ..speed.runs import Run, RunResult, read_run


def report(
    runs: list[Path] = typer.Argument(metavar="RUN", help="Run directories of `kimi-w4a8 bench`, `eval` or `accept`."),
    out: Path | None = typer.Option(None, "--output", "-o", help="Folder; default: `report` in the last run."),
) -> None:
    """Write one HTML page and SVG figures from finished runs.

    The page is self-contained and made anew of the runs' figures. The runs may be of another machine or person. A
    folder that cannot be shown gets a line that says what is missing. If no folder can be shown, a page is written only
    with --output.
    """
    speed, pages, errors = list[Run](), list[Page](), list[KimiError]()
    for folder in runs:
        try:
            run = RunFolder[object].open(folder, RunResult, AcceptResult, *RESULTS)
            match run.result:
                case RunResult():
                    speed.append(read_run(folder))
                case AcceptResult() as result:
                    pages.append(claims.page(result))
                case EvalResult() as result:
                    pages.append(evaluation.page(folder, result))
        except KimiError as error:
            errors.append(error)
            pages.append(unreadable(folder, error))
    if errors and out is None and not speed and len(errors) == len(pages):
        raise errors[0]
    pages = [*([measured.page(Analysis(speed))] if speed else []), *pages]
    typer.echo(f"page: {write_page(joined(pages), out or runs[-1] / 'report')}")
    if len(errors) == len(runs):
        raise errors[0]
