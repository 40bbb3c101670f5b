"""`kimi-w4a8 gates`: the kernel gates with their current values and origins."""

from __future__ import annotations

import json
import os
from typing import Any

import typer
from rich.padding import Padding
from rich.text import Text

from ..base.console import table_console
from ..base.errors import UsageError
from ..gates import OUR_BACKENDS, TABLE, ignored_gates, read_gates
from ..recipe.launch import load_recipe
from ..recipe.schema import one_recipe
from .options import RECIPE, RECIPE_NAME


def gates(
    name: str | None = RECIPE_NAME,
    recipe: str | None = RECIPE,
    moe_backend: str = typer.Option("flydsl", "--moe-backend", help="Warn about gates that this MoE backend ignores."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List every kernel gate: value, origin, reader, effect.

    A misspelt gate is an error. With RECIPE it shows the values that the recipe sets.
    """
    if moe_backend not in OUR_BACKENDS:
        raise UsageError(f"no MoE backend {moe_backend!r}", where="--moe-backend", expected=", ".join(OUR_BACKENDS))
    chosen = one_recipe(name, recipe, default="")
    recipe_env = load_recipe(chosen).environment if chosen else {}
    checked = read_gates({**os.environ, **recipe_env})  # as in a server's environment, the recipe's values win
    rows: list[dict[str, Any]] = []
    for gate in TABLE:
        value = checked.get(gate.name)
        origin = "recipe" if gate.name in recipe_env else "environment" if value is not None else "default"
        about = {"allowed": gate.expected, "reader": gate.reader, "effect": gate.effect, "backends": gate.backends}
        rows.append({"name": gate.name, "value": gate.default if value is None else value, "origin": origin, **about})
    warnings = ignored_gates(checked, moe_backend)
    if as_json:
        typer.echo(json.dumps({"gates": rows, "warnings": warnings}, indent=2))
        return
    _print(rows, warnings)


def _print(rows: list[dict[str, Any]], warnings: list[str]) -> None:
    console = table_console()
    for row in rows:
        value = row["value"]
        shown = "-" if value in (None, "") else int(value) if isinstance(value, bool) else value
        head = f"{row['name']}={shown} ({row['origin']}; allowed: {row['allowed']})"
        console.print(Text(head, "" if row["origin"] == "default" else "bold"))
        console.print(Padding(f"{row['effect']} ({row['reader']})", (0, 0, 0, 4), expand=False))
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
