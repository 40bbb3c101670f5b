"""Reads what an earlier accuracy run recorded about itself, to resume it or to compare with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.errors import KimiError
from ..base.run_dir import RECORD
from ..fleet.serve import Terminated
from . import tasks
from .harness import Protocol

_TASKS = {task.name: task for task in (tasks.GSM8K, tasks.TINY_MATH)}
_COMPARED = ("task", "chat", "shots", "seed")


def protocol_of(run: dict[str, Any]) -> Protocol:
    """The protocol of a recorded run."""
    fields = dict(run["protocol"])
    return Protocol(**{**fields, "task": _TASKS[fields["task"]]})


def load_run(
    folder: Path,
    protocol: Callable[[dict[str, Any]], object] = protocol_of,
    made_by: str = "`kimi-w4a8 eval gsm8k` or `kimi-w4a8 eval tiny-math`",
) -> dict[str, Any]:
    """The run.json of a run that can be resumed; raises KimiError for one whose `protocol` cannot be read."""
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        protocol(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KimiError(
            f"not the folder of such a run: {error}", where=str(path), expected=f"a run directory of {made_by}"
        ) from error
    return found


@contextmanager
def resumable(folder: Path, console: Console) -> Iterator[None]:
    """Tell how to go on with a run that ends inside the block."""
    try:
        yield
    except KimiError as error:
        error.remedy = "; ".join(filter(None, (error.remedy, f"what was answered is kept: --resume {folder}")))
        raise
    except Terminated:
        console.print(f"kimi-w4a8: what was answered is kept; go on with --resume {folder}")
        raise


def require_same_protocol(baseline: dict[str, Any], protocol: Protocol) -> None:
    """Raise KimiError when two runs asked in different ways: their difference would say nothing about the servers."""
    theirs = protocol_of(baseline)
    for name in _COMPARED:
        ours, other = getattr(protocol, name), getattr(theirs, name)
        if ours != other:
            raise KimiError(
                f"the baseline was measured with another protocol: {name} {_show(other)}, here {_show(ours)}",
                where="--baseline",
                expected="the same task, examples and prompt format in both runs",
            )


def _show(value: Any) -> Any:
    return value.title if isinstance(value, tasks.Task) else value
