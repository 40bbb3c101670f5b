"""Reads what an earlier accuracy run recorded about itself, to resume it or to compare with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.errors import KimiError
from ..base.run_dir import RECORD
from . import tasks
from .harness import Protocol

_TASKS = {task.name: task for task in (tasks.GSM8K, tasks.TINY_MATH)}
_COMPARED = ("task", "chat", "shots", "seed")


def load_run(folder: Path) -> dict[str, Any]:
    """The run.json of an accuracy run; raises KimiError for anything else."""
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        protocol_of(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KimiError(
            f"not the folder of an accuracy run: {error}",
            where=str(path),
            expected="a run directory of `kimi eval gsm8k` or `kimi eval tiny-math`",
        ) from error
    return found


def protocol_of(run: dict[str, Any]) -> Protocol:
    """The protocol of a recorded run."""
    fields = dict(run["protocol"])
    return Protocol(**{**fields, "task": _TASKS[fields["task"]]})


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
