"""`kimi-w4a8 doctor`: checks of this machine for a recipe, one line each."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..base.console import table_console
from ..base.errors import on_host
from ..base.finding import STYLES
from ..doctor.probe import Probe
from ..doctor.result import Report
from ..doctor.runner import examine
from ..recipe.launch import load_recipe, resolve
from ..recipe.schema import one_recipe
from .options import RECIPE, RECIPE_NAME


def doctor(
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    port: Annotated[int | None, typer.Option(help="The port to serve on, if not the recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine for a recipe: hardware, software, limits.

    GPUs, ROCm, NUMA, memory, limits, disk, packages, patches and ports are checked. The default recipe is agent.
    """
    settings = [] if port is None else [f"port={port}"]
    report = examine(Probe(), resolve(load_recipe(one_recipe(name, recipe, "agent")), settings))
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print(report)
    if report.failed:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    """Print one line per check, with its remedy."""
    console = table_console()
    lines = Table.grid(padding=(0, 2))
    for result in report.results:
        arrow = " ->" if console.width > 120 else "\n->"
        found = result.found + (f"{arrow} {on_host(result.remedy)}" if result.remedy else "")
        lines.add_row(Text(result.severity.value, STYLES[result.severity]), result.name, Text(found))
    console.print(lines)
    verdict = "not ready" if report.failed else "ready"
    counts = ", ".join(f"{n} {name}" for name, n in report.counts.items() if n)
    console.print(f"recipe {report.recipe}: {verdict} ({counts})")
