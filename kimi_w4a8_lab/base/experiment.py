"""Functions of `run_folder` for the evaluations and `accept`, which do not use its class yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from .run_folder import RESULT as RESULT
from .run_folder import RunFolder

R = TypeVar("R")


def write_result(folder: Path, result: object) -> None:
    RunFolder[object](folder, {}).save(result)


def read_result(folder: Path, *kinds: type[R]) -> R:
    return RunFolder[R].open(folder, *kinds).result


def read_record(folder: Path) -> dict[str, Any]:
    return RunFolder[object].resume(folder).record


def read_plan(folder: Path, kind: type[R]) -> R:
    return RunFolder[object].resume(folder).plan(kind)


def continuable(folder: Path, say: Callable[[str], object]) -> AbstractContextManager[None]:
    return RunFolder[object](folder, {}).continuable(say)
