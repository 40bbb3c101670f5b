"""`kimi-w4a8 trust`: show the Python code of checkpoints, and record that it was read and may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..base.errors import UsageError
from ..recipe.launch import load_recipe, recipe_names
from ..recipe.trusted_code import Source, accept, locate, record_path, state


def trust(
    names: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="owner/name, or directory.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="The target and draft of this recipe.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of MODEL (default: main).")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Record the files as read and accepted.")] = False,
) -> None:
    """Show the Python files of a checkpoint; --yes accepts them.

    They would run under --trust-remote-code. `kimi-w4a8 serve` runs only accepted files. The exit status is 1 while
    some are not accepted.
    """
    if bool(names) == bool(recipe) or (recipe and revision):
        expected = "MODEL ... and perhaps --revision, or --recipe NAME, which pins its own"
        raise UsageError("no checkpoint was named, or too much", expected=expected)
    if mistaken := {*(names or [])} & {*recipe_names()}:
        raise UsageError(f"{mistaken.pop()!r} is a recipe", expected="MODEL: owner/name", remedy="--recipe")
    checkpoints = load_recipe(recipe).checkpoints if recipe else ()
    wanted = [(one.repo, one.revision) for one in checkpoints if not one.repo.startswith("builtin:")]
    sources = [locate(*one) for one in wanted or [(name, revision or "main") for name in names or []]]
    if not any(source.code() for source in sources):
        print("these checkpoints contain no Python code, so there is nothing to accept")
        return
    if yes:
        accept(sources)
    show(sources)
    if yes:
        print(f"recorded in {record_path()}")
    elif any({*state(source).values()} - {"accepted"} for source in sources):
        print("read these files, then accept them with --yes")
        raise typer.Exit(1)


def show(sources: Sequence[Source]) -> None:
    """Print each Python file with its state and SHA-256."""
    for source in sources:
        print(f"{source}, in {source.folder}")
        for path, what in state(source).items():
            print(f"  {what:<9}{source.code().get(path, ''):<64}  {path}")
