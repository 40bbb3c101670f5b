"""JSON-lines files of a run: one finished item a line, appended as it ends, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.files import lines, write_atomic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row")


def write_rows(path: Path, rows: Sequence[DataclassInstance]) -> None:
    write_atomic(path, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Read the rows of `path`. A last line that a crash cut is removed from the file, so that the next row is whole.

    Raises KimiError for an unreadable file and for a line that is not such a row.
    """
    adapter, found = TypeAdapter(kind), list[Row]()
    try:
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        for line in lines(path):
            found.append(adapter.validate_json(line))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else None
        what = f"line {len(found) + 1}: {'.'.join(map(str, detail['loc']))} {detail['msg']}" if detail else str(error)
        raise KimiError(
            f"not the record of a run: {what}",
            where=str(path),
            expected="the unchanged file of a finished or interrupted run",
            remedy="finish that run with --resume, name another one, or start a new run",
        ) from error
    return found
