"""`kimi-w4a8 patch`: apply the patches of `patches/` to the installed AITER."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table

from ..base.console import table_console
from ..machine.aiter_patches import State, apply_patches, patch_states


def patch(
    check: bool = typer.Option(False, "--check", help="Change nothing; exit code 1 if a patch that fits is missing."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Apply the patches of AITER's sources that fit.

    The modules that were compiled before are deleted. A patch that does not fit leaves the files as they are. The
    page-offset guard then keeps the limit of these files.
    """
    states = patch_states() if check else apply_patches()
    table = Table("patch", "state", "detail")
    for row in states:
        table.add_row(row.name, row.state.value, row.detail)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in states], indent=2))
    else:
        table_console().print(table)
    if any(row.state in (State.NOT_APPLIED, State.STALE_BUILD) for row in states):
        raise typer.Exit(1)
