"""`kimi bench export-inferencex`: a run in the form that InferenceX reads, for comparison."""

from __future__ import annotations

from pathlib import Path

import typer


def export_inferencex(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory of `kimi bench`."),
    destination: Path = typer.Option(None, "--out", help="Folder to make; default: RUN/inferencex."),
) -> None:
    """Write InferenceX's master-config entry, result files, and a side-car with method, draft and accept length."""
    from ..bench.runs import read_run
    from ..inferencex import READ_AT, export

    for file in export(read_run(run), destination or run / "inferencex"):
        typer.echo(str(file))
    typer.echo(f"by the rules read at {READ_AT}; comparable, not submittable: see docs/inferencex.md", err=True)
