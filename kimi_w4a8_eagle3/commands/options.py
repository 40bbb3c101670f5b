"""What commands share: options one by one and in groups (a dataclass is one parameter of a command), how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import typer

from ..base.errors import KimiError, UsageError
from ..base.signals import Terminated, signals_raise
from ..recipe.schema import recipe_names

RUNS = typer.Option(Path("runs"), "--runs", help="Where the run directory is created.")
RECIPE_NAME = typer.Argument(
    None, metavar="RECIPE", help="A packaged recipe (agent; agent:plain without its draft) or a TOML file."
)
RECIPE = typer.Option(None, "--recipe", "-r", help="The same as an option.")
KEY_FILE = typer.Option(None, "--api-key-file", help="File with the server's key; default: as for `kimi-w4a8 serve`.")
OPS_URL = typer.Option(None, "--ops-url", help="Of a router: its ops endpoint; default: the port after its own.")


def one_recipe(named: str | None, option: str | None, default: str | None = None) -> str:
    """The recipe, given as RECIPE or by --recipe; UsageError when it is both, or neither and there is no default."""
    if named and option:
        raise UsageError("two recipes were given", where=f"{named}, --recipe {option}", remedy="drop one")
    if found := named or option:
        return found
    if default is None:
        raise UsageError("no recipe was named", expected=f"one of {', '.join(recipe_names())}; or a TOML file")
    return default


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` for typer: each parameter whose type is a dataclass becomes that class's fields, in its place."""
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        group = groups.get(name)
        types = get_type_hints(group) if group else hints
        inner = signature(group).parameters.values() if group else [parameter]
        parameters += [each.replace(kind=Parameter.KEYWORD_ONLY, annotation=types[each.name]) for each in inner]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextmanager
def signals(runs: Path) -> Iterator[None]:
    """Signals stop servers and generators cleanly; a full disk is one message."""
    try:
        with signals_raise():
            yield
    except Terminated as stopped:
        typer.echo(
            f"kimi-w4a8: {stopped} received; what was started is stopped; the run directory is not complete", err=True
        )
        raise typer.Exit(stopped.exit_code) from None
    except OSError as error:
        raise KimiError(
            f"a file cannot be written: {error.strerror}",
            where=str(error.filename or runs),
            remedy="is the disk full? What was measured before stays in the run directory",
        ) from error
