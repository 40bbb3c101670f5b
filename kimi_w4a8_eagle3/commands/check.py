"""`kimi-w4a8 check`: check that a checkpoint can be served with this draft and tensor-parallel size."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from ..base.console import table_console
from ..base.errors import KimiError, UsageError
from ..base.files import write_atomic
from ..engine import startup_check
from ..engine.client import EngineClient
from ..gateway.settings import client_key
from ..quark.preflight import PreflightReport, preflight
from ..quark.target_checks import Problem
from ..recipe.trusted_code import Source, untrusted
from ..supervision.checks import weights_digest
from .options import KEY_FILE


def check(
    model: Path = typer.Argument(metavar="MODEL", help="Directory of the target checkpoint."),
    draft: Path = typer.Option(None, "--draft", help="Directory of the EAGLE3 draft to check against the target."),
    tp: int = typer.Option(1, "--tp", min=1, help="Tensor-parallel size that must divide the shapes."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of tables."),
    record: Path = typer.Option(None, "--record", help="Write the canary's answers of a server to this file."),
    base_url: str = typer.Option(None, "--base-url", help="The server, which serves this checkpoint."),
    key_file: Path = KEY_FILE,
) -> None:
    """Check a checkpoint by configs, headers and small tensors.

    No weight matrix is read. The exit status is 0 if the checkpoint can be served, and 1 if there are problems. With
    --record, a recipe's lines that hold later servers to these files and answers are printed instead.
    """
    if record is not None:
        if base_url is None:
            raise UsageError("no server was named", where="--record", expected="--base-url URL")
        pinned = {"repo": str(model.absolute()), "sha256": weights_digest(model), "answers": str(record.absolute())}
        with EngineClient(base_url.rstrip("/").removesuffix("/v1"), client_key(key_file, os.environ)) as client:
            answers = startup_check.recorded(client, startup_check.require_answers(client, 1))
        write_atomic(record, json.dumps(answers) + "\n")
        typer.echo("\n".join(["[model]", *(f"{name} = {json.dumps(text)}" for name, text in pinned.items())]))
        return
    if base_url or key_file:
        raise UsageError("no server is asked without --record", "--base-url, --api-key-file", "--record FILE with them")
    report = preflight(model, draft, tp)
    report.problems += _code_problems([path for path in (model, draft) if path is not None and path.is_dir()])
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        console = table_console()
        console.print(_summary(report))
        if report.problems:
            console.print(_problems(report))
        for note in report.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)
    raise typer.Exit(0 if report.ok else 1)


def _code_problems(folders: list[Path]) -> list[Problem]:
    """Return the problems of Python files that `kimi-w4a8 serve` would refuse to run."""
    problems = []
    for folder in folders:
        try:
            error = untrusted([Source(str(folder), folder)])
        except KimiError as found:
            error = found
        if error is not None:
            problems.append(Problem.of("code", error))
    return problems


def _summary(report: PreflightReport) -> Table:
    verdict = "[green]can be served[/]" if report.ok else f"[bold red]{len(report.problems)} problem(s)[/]"
    table = Table(title=f"Checkpoint: {verdict}", show_header=False)
    rows = {
        "target": report.model,
        "draft": report.draft or "none",
        "tensor parallel": str(report.tp),
        "weights": report.weight_format,
        "files": f"{report.shards} shards, {report.tensors:,} tensors, {report.nbytes / 1e9:,.3f} GB",
        "small tensors read": f"{report.small_tensors_read:,}",
        "time": f"{report.seconds:.2f} s",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _problems(report: PreflightReport) -> Table:
    table = Table(title="Problems", show_lines=True)
    table.add_column("check", no_wrap=True)
    table.add_column("what is wrong", overflow="fold")
    for problem in report.problems:
        table.add_row(problem.name, escape(str(problem.error())))
    return table
