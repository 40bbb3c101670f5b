"""Folder of an experiment of `bench`, `eval` or `accept`: its record, its typed result, and how it continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from pydantic import Field, TypeAdapter, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD, write_json
from kimi_w4a8_eagle3.base.signals import Terminated

RESULT = "result.json"
_EXPECTED = "the unchanged folder of a run of `kimi-w4a8 bench`, `eval` or `accept`"
R = TypeVar("R")


def write_result(folder: Path, result: object) -> None:
    """Write result.json; a killed run leaves the earlier one."""
    write_json(folder / RESULT, TypeAdapter(type(result)).dump_python(result, mode="json"))


def read_result(folder: Path, *kinds: type[R]) -> R:
    """Read result.json as the one of `kinds` that its field `kind` names. Raises KimiError for anything else."""
    one_of: Any = kinds[0] if len(kinds) == 1 else Annotated[Union[kinds], Field(discriminator="kind")]  # noqa: UP007
    try:
        found: R = TypeAdapter(one_of).validate_json((folder / RESULT).read_bytes())
    except OSError as error:
        raise KimiError(f"no finished run is here: {error.strerror}", str(folder / RESULT), _EXPECTED) from None
    except ValidationError as error:
        page = folder / "report.html"
        again = "the run was cut off, or is of another version or kind: run it again"
        remedy = f"open its own page, {page}, or run it again" if page.is_file() else again
        raise KimiError(f"{RESULT} cannot be read: {_first(error)}", str(folder), _EXPECTED, remedy) from None
    return found


def _first(error: ValidationError) -> str:
    """Return the first error, or that of the kind: a result of another kind has many."""
    errors = error.errors()
    first = next((found for found in errors if found["loc"] == ("kind",)), errors[0])
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")


def read_record(folder: Path, read: Callable[[dict[str, Any]], object] = dict) -> dict[str, Any]:
    """Read the run.json of a run. Raises KimiError if `read` cannot use it."""
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        read(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"not a run that can be used here: {type(error).__name__}: {error}"
        raise KimiError(what, str(path), "a run directory of the same `kimi-w4a8` command") from error
    return found


@contextmanager
def continuable(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Add to an error that ends the block, and say after a signal, how the run continues."""
    how = f"what is finished is kept; repeat the command with --resume {folder}"
    try:
        yield
    except KimiError as error:
        error.remedy = "; ".join(filter(None, (error.remedy, how)))
        raise
    except Terminated:
        say(f"kimi-w4a8: {how}")
        raise
