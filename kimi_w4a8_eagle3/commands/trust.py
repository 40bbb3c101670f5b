"""`kimi-w4a8 trust`: show the Python code of checkpoints, and record that it was read and may run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import constants
from rich.markup import escape
from rich.table import Table

from ..base.console import table_console
from ..base.errors import UsageError
from ..recipe.launch import load_recipe, recipe_names
from ..recipe.trusted_code import CodeFile, TrustRecord, code_of, locate


def trust(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="owner/name, directory, recipe.")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="The target and draft of this recipe.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL (default: main).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Record the files as read and accepted.")] = False,
) -> None:
    """Show the Python files of a checkpoint; --yes accepts them.

    They would run under --trust-remote-code. `kimi-w4a8 serve` runs only accepted files. The exit status is 1 while
    some are not accepted.
    """
    named, recipes = [*(names or []), *([recipe] if recipe else [])], {*recipe_names(), recipe}
    if revision and recipes & {*named}:
        raise UsageError("--revision does not go with a recipe", remedy="drop --revision: the recipe pins its own")
    wanted = [one for name in named for one in (_of_recipe(name) if name in recipes else [(name, revision or "main")])]
    if not wanted and recipe is None:
        raise UsageError("no checkpoint was named", expected="MODEL ..., or --recipe NAME")
    cache = Path(constants.HF_HUB_CACHE)
    record = TrustRecord.load()
    files = [file for name, wanted_revision in wanted for file in code_of(locate(name, wanted_revision, cache), cache)]
    if as_json:
        if yes:
            record.add(files)
        states = [{"file": str(file.path), "sha256": file.sha256, "accepted": record.trusts(file)} for file in files]
        typer.echo(json.dumps(states, indent=2))
        raise typer.Exit(0 if all(state["accepted"] for state in states) else 1)
    console = table_console()
    if not files:
        console.print("these checkpoints contain no Python code, so there is nothing to accept")
        return
    for source in dict.fromkeys(file.source for file in files):
        console.print(_table([file for file in files if file.source == source], record))
        console.print(f"{source}, in {source.folder}\n", soft_wrap=True, markup=False)
    if yes:
        record.add(files)
        console.print(f"recorded in {record.path}", soft_wrap=True, markup=False)
    elif not all(record.trusts(file) for file in files):
        console.print("read these files, then accept them with --yes", soft_wrap=True)
        raise typer.Exit(1)


def _of_recipe(name: str) -> list[tuple[str, str]]:
    """Return a recipe's Hub repositories and directories; a built-in model has no code."""
    checkpoints = load_recipe(name).checkpoints
    return [(item.repo, item.revision) for item in checkpoints if not item.repo.startswith("builtin:")]


def _table(files: list[CodeFile], record: TrustRecord) -> Table:
    table = Table()
    for header in ("file", "lines", "SHA-256", "state"):
        table.add_column(header, overflow="fold")
    for file in files:
        lines = len(file.path.read_bytes().splitlines())
        table.add_row(escape(file.name), str(lines), file.sha256, record.state(file))
    return table
