"""Stages of an acceptance run, and their results in its folder, so that a second run continues the first one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.finding import Finding, Severity
from kimi_w4a8_eagle3.base.run_dir import RECORD, git_commit, installed_versions, new_run_dir, record, write_json
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.experiment import read_result, write_result


@dataclass(frozen=True)
class Figure:
    """Measured figure with its prediction and published value, if any."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    published: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} {self.unit}"


@dataclass(frozen=True)
class StageResult(Finding):
    """OK or FAIL of a stage, or SKIP if it did not run, with its figures. proves, missing: as of the stage."""

    proves: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    missing: str = ""


class Skipped(KimiError):
    """Raised by a stage that cannot run because another one failed."""


@dataclass(frozen=True)
class Stage:
    """One step of the run. proves: claim it settles, "" for none. missing: why it cannot run here, "" if it can.

    run returns a sentence and figures, or raises KimiError. minutes: expected on eight MI325X.
    """

    name: str
    proves: str
    run: Callable[[], tuple[str, list[Figure]]]
    missing: str = ""
    minutes: float = 0.0


@dataclass
class AcceptResult:
    """result.json of an acceptance run: every stage by name. identity: versions and sizes, which decide the results."""

    identity: dict[str, str]
    stages: dict[str, StageResult] = field(default_factory=dict)
    kind: Literal["accept"] = "accept"

    def names(self, severity: Severity) -> list[str]:
        return [name for name, result in self.stages.items() if result.severity is severity]

    def add(self, result: StageResult) -> None:
        self.stages[result.name] = result

    @property
    def accepted(self) -> bool:
        can_run = [result for result in self.stages.values() if not result.missing]
        return bool(can_run) and all(result.severity is Severity.OK for result in can_run)

    @property
    def headline(self) -> str:
        passed, failed = self.names(Severity.OK), self.names(Severity.FAIL)
        head = "NOT ACCEPTED" if failed else "ACCEPTED" if self.accepted else "NOT FINISHED"
        words = [f"{len(passed)} of {len(self.stages)} stages passed"]
        words += [f"failed: {', '.join(failed)}"] if failed else []
        return f"{head}: {'; '.join(words)}"


def open_run(runs: Path, sizes: str, restart: bool) -> tuple[Path, AcceptResult]:
    """Return the newest run under `runs`, or a new one if there is none or `restart` is set.

    Raises KimiError for an unreadable run and for one with other versions or sizes.
    """
    identity = {**installed_versions(), "commit": git_commit() or "none", "sizes": sizes}
    earlier = sorted(runs.glob(f"*-{AcceptResult.kind}*/{RECORD}"))
    if restart or not earlier:
        folder, result = new_run_dir(AcceptResult.kind, runs), AcceptResult(identity)
        gpus = [asdict(device) for device in Machine.detect().devices]
        write_json(folder / RECORD, record(AcceptResult.kind, {}, {}, gpus=gpus))
        write_result(folder, result)
        return folder, result
    folder = earlier[-1].parent
    try:
        result = read_result(folder, AcceptResult)
        before = result.identity
        names = sorted(name for name in identity.keys() | before.keys() if identity.get(name) != before.get(name))
        if names:
            changes = (f"{name} is {identity.get(name)}, was {before.get(name)}" for name in names)
            raise KimiError(f"the conditions have changed: {'; '.join(changes)}", where=str(folder))
    except KimiError as error:
        error.remedy = "start a new run with --restart, which keeps the earlier one"
        raise
    return folder, result


def run_stages(stages: Sequence[Stage], folder: Path, result: AcceptResult, say: Callable[[str], None]) -> None:
    """Run the stages that have not passed yet, in order, and record the result of each.

    A failure is recorded and the next stage runs. Raises KimiError at the end if a stage failed. An interrupted stage
    is not recorded and runs again.
    """
    passed, failed = result.names(Severity.OK), result.names(Severity.FAIL)
    began, todo = time.monotonic(), [stage for stage in stages if not stage.missing and stage.name not in passed]
    for stage in stages:
        if not stage.missing and stage.name in passed:
            say(f"{stage.name}: passed before")
        elif stage.missing or stage.name not in failed:
            why = stage.missing or "not reached"
            result.add(StageResult(why, Severity.SKIP, stage.name, proves=stage.proves, missing=stage.missing))
    write_result(folder, result)
    say(f"timetable: about {sum(stage.minutes for stage in todo):.0f} min")
    for stage in todo:
        say(f"{stage.minutes:6g} min  {stage.name}")
    for number, stage in enumerate(todo):
        left = sum(later.minutes for later in todo[number:])
        clock = f"{(time.monotonic() - began) / 60:.0f} min so far, about {left:.0f} to go"
        say(f"[{number + 1}/{len(todo)}] {stage.name} ({clock})")
        found = _result(stage, folder)
        result.add(found)
        write_result(folder, result)
        if found.severity is not Severity.OK:
            say(f"{stage.name}: {found.severity.value}: {found.found}")
    if failed := result.names(Severity.FAIL):
        first = result.stages[failed[0]].found.partition("\n")[0]
        raise KimiError(
            f"{len(failed)} of {len(stages)} stages failed; {failed[0]}: {first}",
            remedy="mend it and repeat the command, which runs only the stages that have not passed",
        )


def _result(stage: Stage, folder: Path) -> StageResult:
    began, figures, severity = time.monotonic(), list[Figure](), Severity.FAIL
    try:
        found, figures = stage.run()
        severity = Severity.OK
    except Skipped as reason:
        severity, found = Severity.SKIP, reason.what
    except KimiError as error:
        found = str(error)
    except Exception as error:  # the other stages, the page and the bundle must not suffer from it
        (folder / "traceback.txt").write_text(traceback.format_exc())
        found = f"{type(error).__name__}: {error}; report it and attach the bundle"
    seconds = time.monotonic() - began
    return StageResult(found, severity, stage.name, proves=stage.proves, seconds=seconds, figures=figures)
