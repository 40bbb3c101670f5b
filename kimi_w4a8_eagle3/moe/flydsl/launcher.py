"""A kernel's entry: its parameters are the fields of a dataclass, which its code reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, TypeVar

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import ops as ops
from .configs import WAVES

Arguments = TypeVar("Arguments")


def launcher(
    name: str, arguments: type[Arguments], emit: Callable[[Arguments], None], hints: Mapping[str, int] | None = None
) -> Any:
    """Return a host function that launches the kernel `name`; FlyDSL compiles this function.

    arguments: dataclass of `kernel_arguments.py`; its fields are the kernel's parameters.
    emit: emits the body of the kernel.
    """
    types, kind = {"Address": fx.Int64, "Number": fx.Int32}, Parameter.POSITIONAL_OR_KEYWORD
    taken = fields(arguments)  # type: ignore[arg-type]  # a dataclass
    signature = Signature([Parameter(field.name, kind, annotation=types[str(field.type)]) for field in taken])

    def body(**values: Any) -> None:
        emit(arguments(**values))

    body.__name__, body.__signature__ = name, signature  # type: ignore[attr-defined]  # FlyDSL reads both
    kernel = flyc.kernel(body, known_block_size=[WAVES * ops.WAVE, 1, 1])

    @flyc.jit
    def launch(**values: Any) -> None:
        kernel(**values).launch(block=(WAVES * ops.WAVE, 1, 1))

    launch.func.__signature__ = signature
    launch.compile_hints = hints or {}
    return launch
