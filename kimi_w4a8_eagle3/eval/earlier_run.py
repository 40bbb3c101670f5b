"""Records of runs with a verdict: written at the end, and read to resume a run or to compare with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..base.errors import KimiError
from ..base.run_dir import RECORD, write_json
from ..base.signals import Terminated
from ..fleet.target import Server
from . import tasks
from .harness import Protocol
from .judge import Conclusion
from .recorder import Recorder

RESULT = "result.json"
_TASKS = {task.name: task for task in (tasks.GSM8K, tasks.TINY_MATH)}
_COMPARED = ("task", "chat", "shots", "seed")


def protocol_of(run: dict[str, Any]) -> Protocol:
    fields = dict(run["protocol"])
    return Protocol(**{**fields, "task": _TASKS[fields["task"]]})


def load_run(
    folder: Path,
    protocol: Callable[[dict[str, Any]], object] = protocol_of,
    made_by: str = "`kimi-w4a8 eval gsm8k` or `kimi-w4a8 eval tiny-math`",
) -> dict[str, Any]:
    """Load the run.json of a resumable run; raise KimiError if `protocol` cannot read it."""
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        protocol(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KimiError(
            f"not a run that can be used here: {error}", where=str(path), expected=f"a run directory of {made_by}"
        ) from error
    return found


@contextmanager
def resumable(folder: Path, console: Console) -> Iterator[None]:
    """Name the option that resumes the run when the block fails or is terminated."""
    try:
        yield
    except KimiError as error:
        error.remedy = "; ".join(filter(None, (error.remedy, f"the answers are kept; continue with --resume {folder}")))
        raise
    except Terminated:
        console.print(f"kimi-w4a8: the answers are kept; continue with --resume {folder}")
        raise


def require_same_protocol(baseline: dict[str, Any], protocol: Protocol) -> None:
    """Raise KimiError unless both runs used the same protocol; otherwise they cannot be compared."""
    theirs = protocol_of(baseline)
    for name in _COMPARED:
        ours, other = getattr(protocol, name), getattr(theirs, name)
        if ours != other:
            raise KimiError(
                f"the baseline used another protocol: {name} {_show(other)}, this run has {_show(ours)}",
                where="--baseline",
                expected="the same task, examples and prompt format in both runs",
            )


def _show(value: Any) -> Any:
    return value.title if isinstance(value, tasks.Task) else value


def write_result(
    folder: Path, kind: str, task: str, server: Server, recorder: Recorder, verdict: Conclusion, **facts: object
) -> Path:
    """Write result.json of a finished run and return its folder."""
    reused = len(recorder.reused)
    result = {
        "kind": kind,
        "task": task,
        "configuration": server.name,
        "model": server.model,
        "requests": {"asked": recorder.finished - reused, "reused": reused, "retries": recorder.retries},
        "verdict": asdict(verdict),
        **facts,
    }
    write_json(folder / RESULT, result)
    return folder
