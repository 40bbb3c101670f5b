"""Shared options of the commands, single or grouped in dataclasses, and their handling of signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import typer

from ..base.errors import KimiError
from ..base.signals import Terminated, signals_raise
from ..recipe.schema import recipe_names

RUNS = typer.Option(Path("runs"), "--runs", envvar="KIMI_RUNS", help="Folder of the run directories.")


def complete(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function for the shell: those of the names that begin with the typed text."""

    def matching(typed: str) -> list[str]:
        return [name for name in names() if name.startswith(typed)]

    return matching


RECIPE_NAME = typer.Argument(
    None,
    metavar="RECIPE",
    help="A packaged recipe (agent; agent:plain without its draft) or a TOML file.",
    autocompletion=complete(recipe_names),
)
RECIPE = typer.Option(None, "--recipe", "-r", help="The recipe, as an option.", autocompletion=complete(recipe_names))
KEY_FILE = typer.Option(None, "--api-key-file", help="File with the server's key; default: as in `kimi-w4a8 serve`.")
OPS_PORT = typer.Option(None, "--ops-port", help="Probes and metrics; default: port + 1; 0: none.")
OPS_HOST = typer.Option("127.0.0.1", "--ops-host", help="Address for probes and metrics.")
DRAIN_TIMEOUT = typer.Option(120.0, "--drain-timeout", min=0, help="Seconds for running requests at SIGTERM.")
OPS_URL = typer.Option(None, "--ops-url", help="A router's ops endpoint; default: the port after the router's.")


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` for typer, with each dataclass parameter replaced by the fields of that class."""
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        group = groups.get(name)
        types = get_type_hints(group) if group else hints
        inner = signature(group).parameters.values() if group else [parameter]
        parameters += [field.replace(kind=Parameter.KEYWORD_ONLY, annotation=types[field.name]) for field in inner]

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
    """Stop servers and generators on signals, and report a full disk as one message."""
    try:
        with signals_raise():
            yield
    except Terminated as stopped:
        typer.echo(
            f"kimi-w4a8: {stopped} received; started processes have ended; the run directory is incomplete", err=True
        )
        raise typer.Exit(stopped.exit_code) from None
    except OSError as error:
        raise KimiError(
            f"cannot write a file: {error.strerror}",
            where=str(error.filename or runs),
            remedy="check the free disk space; finished measurements remain in the run directory",
        ) from error
