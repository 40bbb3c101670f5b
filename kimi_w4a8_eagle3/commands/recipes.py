"""`kimi-w4a8 recipes`: the packaged recipes with their summaries."""

from __future__ import annotations

import json

import typer
from rich.table import Column, Table

from ..base.console import table_console
from ..recipe.schema import load_recipe, recipe_names

_COLUMNS = ("recipe", "hardware", "status", "summary")


def recipes(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """List the packaged recipes: hardware, status there, summary."""
    table = Table(Column("recipe", no_wrap=True), "hardware", "summary")  # two names begin alike
    rows = []
    for recipe in map(load_recipe, recipe_names()):
        needs = recipe.hardware
        hardware = f"{needs.gpus} x {needs.reference or ', '.join(needs.arch)}" if needs.gpus else "CPU"
        status = "verified" if (needs.reference or "cpu") in needs.verified else "unverified"
        rows.append((recipe.name, hardware, status, recipe.summary))
        table.add_row(recipe.name, f"{hardware}\n{status}", recipe.summary)
    if as_json:
        typer.echo(json.dumps([dict(zip(_COLUMNS, row, strict=True)) for row in rows], indent=2))
    else:
        table_console().print(table)
