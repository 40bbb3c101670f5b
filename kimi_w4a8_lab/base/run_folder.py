"""Folder of a run of `bench`, `eval` or `accept`, in one format.

run.json is written when the run begins: its kind, command, versions, machine, servers, and the plan that a resumed run
repeats. result.json is replaced when something was found. Its field `kind` names its type. Other files are named there.
A run may come from another machine and another person, so its text cannot act on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Generic, TypeVar, Union

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import Self

from kimi_w4a8_eagle3.base.errors import KimiError, UsageError
from kimi_w4a8_eagle3.base.run_dir import RECORD, new_run_dir, write_json
from kimi_w4a8_eagle3.supervision.serve import Terminated

from .first_error import first_error
from .server_under_test import Target, record_of

RESULT = "result.json"
_EXPECTED = "the unchanged folder of a run of `kimi-w4a8 bench`, `eval` or `accept`"
_AGAIN = "the run was cut off, or is of another version or kind: run it again"
# Control characters, with which text writes on the screen or over its own line, and those that turn its direction.
_ACTING = dict.fromkeys({*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {9, 10}, "?")
R = TypeVar("R")
P = TypeVar("P")


@dataclass
class RunFolder(Generic[R]):
    """A run. record: content of run.json. result: content of result.json, once it was saved or read."""

    folder: Path
    record: dict[str, Any]
    result: R = field(init=False)

    @classmethod
    def begin(
        cls, kind: str, runs: Path, targets: Mapping[str, Target] | None = None, name: str = "", **facts: object
    ) -> Self:
        """Create a folder below `runs` and write run.json. targets: servers by label. name: default is the kind."""
        run = cls(new_run_dir(name or kind, runs), {})
        run.note(**record_of(kind, targets or {}, **facts))
        return run

    @classmethod
    def resume(cls, folder: Path) -> Self:
        """Return a run without its result, which may not be there yet. Raises KimiError if there is no run."""
        return cls(folder, _read(folder / RECORD, dict[str, Any]))

    @classmethod
    def open(cls, folder: Path, *types: type[R]) -> Self:
        """Return a run with its result, which is of the type that its `kind` names. Raises KimiError otherwise."""
        one_of: Any = types[0] if len(types) == 1 else Annotated[Union[types], Field(discriminator="kind")]  # noqa: UP007
        result = _read(folder / RESULT, one_of)
        run = cls.resume(folder)
        run.result = result
        return run

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def plan(self, kind: type[P]) -> P:
        """Return the plan of the run. Raises KimiError for another kind of run."""
        plan: P = _validated(self.record.get("plan"), TypeAdapter(kind), self.folder / RECORD)
        return plan

    def note(self, **facts: object) -> None:
        """Add facts to run.json."""
        self.record |= facts
        write_json(self.folder / RECORD, self.record)

    def save(self, result: R | None = None) -> None:
        """Write the result, by default the present one. A killed run leaves the earlier file."""
        if result is not None:
            self.result = result
        write_json(self.folder / RESULT, TypeAdapter(type(self.result)).dump_python(self.result, mode="json"))

    @contextmanager
    def continuable(self, say: Callable[[str], object]) -> Iterator[None]:
        """Add to an error that ends the block, and say after a signal, how the run continues."""
        how = f"what is finished is kept; repeat the command with --resume {self.folder}"
        try:
            yield
        except KimiError as error:
            if self.folder.exists():
                error.remedy = "; ".join(filter(None, (error.remedy, how)))
            raise
        except Terminated:
            say(f"kimi-w4a8: {how}")
            raise


def require_writable(folder: Path) -> None:
    """Raise KimiError now if a file that is written later would have no place; `folder` need not exist."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        what = f"cannot write here: {error.strerror}"
        raise UsageError(what, str(place), "a folder that can be written", "name another with --output") from error


def _read(path: Path, kind: Any) -> Any:
    try:
        content = from_json(path.read_bytes())
    except OSError as error:
        raise KimiError(f"no run is here: {error.strerror}", str(path), _EXPECTED) from None
    except ValueError as error:
        raise KimiError(
            f"{path.name} cannot be read: Invalid JSON: {error}", str(path.parent), _EXPECTED, _AGAIN
        ) from None
    return _validated(_scrubbed(content), TypeAdapter(kind), path)


def _validated(content: Any, kind: TypeAdapter[Any], path: Path) -> Any:
    try:
        return kind.validate_python(content)
    except ValidationError as error:
        what = f"{path.name} cannot be read: {first_error(error)}"
        raise KimiError(what, str(path.parent), _EXPECTED, _AGAIN) from None


def _scrubbed(value: Any) -> Any:
    """Return a JSON value without characters that act on a terminal."""
    if isinstance(value, str):
        return value.translate(_ACTING)
    if isinstance(value, list):
        return [_scrubbed(item) for item in value]
    if isinstance(value, dict):
        return {_scrubbed(name): _scrubbed(item) for name, item in value.items()}
    return value
