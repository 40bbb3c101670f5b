"""Folder of an experiment of `bench`, `eval` or `accept`: its record, its typed result, and how it continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Generic, TypeVar, Union

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.nearest import nearest
from kimi_w4a8_eagle3.base.run_dir import RECORD, write_json
from kimi_w4a8_eagle3.fleet.serve import Terminated

RESULT = "result.json"
_EXPECTED = "the unchanged folder of a run of `kimi-w4a8 bench`, `eval` or `accept`"
R = TypeVar("R")


class _Planned(BaseModel, Generic[R]):
    plan: R


def require_writable(folder: Path) -> None:
    """Raise KimiError now if a file that is written later would have no place; `folder` need not exist."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        what = f"cannot write here: {error.strerror}"
        raise UsageError(what, str(place), "a folder that can be written", "name another with --output") from error


def write_result(folder: Path, result: object) -> None:
    """Write result.json; a killed run leaves the earlier one."""
    write_json(folder / RESULT, TypeAdapter(type(result)).dump_python(result, mode="json"))


def read_result(folder: Path, *kinds: type[R]) -> R:
    """Read result.json as the one of `kinds` that its field `kind` names. Raises KimiError for anything else."""
    one_of: Any = kinds[0] if len(kinds) == 1 else Annotated[Union[kinds], Field(discriminator="kind")]  # noqa: UP007
    found: R = _read(folder / RESULT, one_of)
    return found


def kind_of(folder: Path) -> str:
    """Return the kind of a run, which `read_result` may not know. Raises KimiError where there is no run."""
    found: dict[str, Any] = _read(folder / RESULT, dict[str, Any])
    return str(found.get("kind"))


def read_record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = _read(folder / RECORD, dict[str, Any])
    return found


def read_plan(folder: Path, kind: type[R]) -> R:
    """Read the settings of an evaluation from its run.json. Raises KimiError for another kind of run."""
    found: R = _read(folder / RECORD, _Planned[kind]).plan  # type: ignore[valid-type]
    return found


def _read(path: Path, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise KimiError(f"no run is here: {error.strerror}", str(path), _EXPECTED) from None
    except ValidationError as error:
        page = path.with_name("report.html")
        again = "the run was cut off, or is of another version or kind: run it again"
        remedy = f"open its own page, {page}, or run it again" if page.is_file() else again
        what = f"{path.name} cannot be read: {first_error(error)}"
        raise KimiError(what, str(path.parent), _EXPECTED, remedy) from None


def first_error(error: ValidationError, valid: Sequence[str] = ()) -> str:
    """Describe the first error, or that of a kind or an unknown field, which has others behind it.

    valid: names of fields, of which the nearest one is suggested for an unknown one.
    """
    errors, unknown = error.errors(), "extra_forbidden"
    first = next((found for found in errors if found["loc"] == ("kind",) or found["type"] == unknown), errors[0])
    place = ".".join(map(str, first["loc"]))
    if first["type"] == unknown:
        return f"unknown field {place!r}{nearest(str(first['loc'][-1]), valid)}"
    return f"{place}: {first['msg']}".removeprefix(": ")


@contextmanager
def continuable(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Add to an error that ends the block, and say after a signal, how the run continues."""
    how = f"what is finished is kept; repeat the command with --resume {folder}"
    try:
        yield
    except KimiError as error:
        if folder.exists():
            error.remedy = "; ".join(filter(None, (error.remedy, how)))
        raise
    except Terminated:
        say(f"kimi-w4a8: {how}")
        raise
