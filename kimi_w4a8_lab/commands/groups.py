"""Options that several commands share as dataclasses, and the commands' handling of signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

import typer

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.supervision.serve import Terminated, signals_raise


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
