"""`kimi-w4a8 patch`: apply, verify and revert changes to installed files of other projects."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer
from rich.table import Table

from ..base.console import table_console
from ..patching import patcher
from ..patching.patcher import SATISFIED, PatchReport, Status, refusal
from ..patching.patches import load_manifest, select

app = typer.Typer(no_args_is_help=True, help="Change installed files of AITER, safely and reversibly.")

_IDS = typer.Option([], "--id", help="Only this patch; may be repeated. Default: all.")
_ROOT = typer.Option(
    None, "--root", exists=True, file_okay=False, help="Tree to patch. Default: the installed package."
)
_JSON = typer.Option(False, "--json", help="Print JSON.")


@app.command()
def status(ids: list[str] = _IDS, root: Path | None = _ROOT, as_json: bool = _JSON) -> None:
    """Show every patch and its state; changes nothing."""
    _print([patcher.inspect(patch, root) for patch in _selected(ids)], as_json)


@app.command()
def apply(
    ids: list[str] = _IDS,
    root: Path | None = _ROOT,
    as_json: bool = _JSON,
    remove_stale: bool = typer.Option(
        False, "--remove-stale", help="Delete modules compiled before the patch; they are rebuilt on next use."
    ),
) -> None:
    """Apply patches; applied or unneeded ones are left alone, and an unrecognised file is refused."""
    patches = _selected(ids)
    _refuse_unrecognised([patcher.inspect(patch, root) for patch in patches])
    for patch in patches:
        patcher.apply(patch, root)
        for path in patcher.remove_stale(patch, root) if remove_stale else []:
            typer.echo(f"{patch.id}: removed {path}", err=True)
    _print([patcher.inspect(patch, root) for patch in patches], as_json)


@app.command()
def verify(ids: list[str] = _IDS, root: Path | None = _ROOT, as_json: bool = _JSON) -> None:
    """Exit with 1 unless every patch is applied or not needed; absent packages count only if named with --id."""
    reports = [patcher.inspect(patch, root) for patch in _selected(ids)]
    _print(reports, as_json)
    satisfied = SATISFIED if ids else {*SATISFIED, Status.NOT_INSTALLED}
    if any(report.status not in satisfied for report in reports):
        raise typer.Exit(1)


@app.command()
def revert(ids: list[str] = _IDS, root: Path | None = _ROOT) -> None:
    """Restore the original files byte for byte; a file that was changed after the patch is refused."""
    for patch in _selected(ids):
        restored = patcher.revert(patch, root)
        typer.echo(f"{patch.id}: " + (", ".join(map(str, restored)) or "nothing to revert"))


def _selected(ids: list[str]) -> list:
    return select(load_manifest(), ids)


def _refuse_unrecognised(reports: list[PatchReport]) -> None:
    """Raise an error before anything is written if a patch does not recognise its file."""
    for report in reports:
        if report.status in (Status.UNKNOWN, Status.MODIFIED):
            raise refusal(report)


def _print(reports: list[PatchReport], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(report) for report in reports], indent=2, default=str))
        return
    table = Table("patch", "state", "version", "detail")
    for report in reports:
        table.add_row(report.id, report.status.value, report.version or "?", report.detail)
    table_console().print(table)
