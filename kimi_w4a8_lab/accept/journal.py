"""Stages of an acceptance run, and their results in its folder, so that a second run continues the first one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD, git_commit, installed_versions
from kimi_w4a8_eagle3.base.run_dir import machine as host
from kimi_w4a8_eagle3.machine.hardware import Machine

from ..base.run_folder import RunFolder
from ..base.verdict import Verdict

WORDS = {verdict: verdict.value for verdict in reversed(Verdict)}
WORDS |= {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.MEASURED: "not judged"}
REFUSED = (Verdict.FAIL, Verdict.SLOW)
DONE = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.MEASURED)  # would end in the same way again


@dataclass(frozen=True)
class Figure:
    """Measured figure with its prediction, its published value and the limit beyond which it is slow, if any."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    published: float | None = None
    limit: float | None = None
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} {self.unit}"


@dataclass(frozen=True)
class StageResult:
    """Verdict on a stage with a sentence and its figures. proves, missing, required: as of the stage."""

    found: str
    verdict: Verdict = Verdict.PASS
    proves: str = ""
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    missing: str = ""
    required: bool = True


class Skipped(KimiError):
    """Raised by a stage that cannot run because another one failed."""


@dataclass(frozen=True)
class Stage:
    """One step of the run. proves: claim it settles, "" for none. missing: why it cannot run here, "" if it can.

    required: a recipe that was asked for needs it, so that the machine is refused if the stage is missing.
    run returns the result without what the stage knows, or raises KimiError. minutes: expected on eight MI325X.
    """

    name: str
    proves: str
    run: Callable[[], StageResult]
    missing: str = ""
    minutes: float = 0.0
    required: bool = True


@dataclass
class AcceptResult:
    """result.json of an acceptance run: every stage by name. identity: versions, machine and sizes, which decide."""

    identity: dict[str, str]
    stages: dict[str, StageResult] = field(default_factory=dict)
    started: str = ""
    kind: Literal["accept"] = "accept"

    def names(self, *verdicts: Verdict) -> list[str]:
        return [name for name, result in self.stages.items() if result.verdict in verdicts]

    def add(self, stage: Stage, result: StageResult) -> None:
        own = replace(result, proves=stage.proves, missing=stage.missing, required=stage.required)
        self.stages[stage.name] = own

    @property
    def lacking(self) -> list[str]:
        """Names of the stages that a recipe needs and this machine cannot run."""
        return [name for name, result in self.stages.items() if result.missing and result.required]

    @property
    def refused(self) -> bool:
        return bool(self.names(*REFUSED) or self.lacking)

    @property
    def accepted(self) -> bool:
        """True if a stage passed, and none that can run here or is required failed, is slow or has not run."""
        verdicts = {result.verdict for result in self.stages.values() if result.required or not result.missing}
        return Verdict.PASS in verdicts and verdicts.issubset(DONE)

    @property
    def headline(self) -> str:
        """Verdict, its first cause, and the number of stages by verdict."""
        head, cause = "ACCEPTED", ""
        if not self.accepted:
            head = "NOT ACCEPTED" if self.refused else "NOT FINISHED"
            waiting = [name for name in self.names(Verdict.NOT_RUN) if not self.stages[name].missing]
            name = (self.names(*REFUSED) or self.lacking or waiting or list(self.stages))[0]
            first, _, _ = self.stages[name].found.partition("\n")
            cause = f"{name}: {first}; "
        counts = {word: len(self.names(verdict)) for verdict, word in WORDS.items()}
        passed = counts.pop(WORDS[Verdict.PASS])
        others = (f", {count} {word}" for word, count in counts.items() if count)
        return f"{head}: {cause}{passed} of {len(self.stages)} stages passed{''.join(others)}"


AcceptFolder = RunFolder[AcceptResult]


def open_run(runs: Path, asked: Mapping[str, str], restart: bool) -> AcceptFolder:
    """Return the newest run under `runs`, or a new one if there is none or `restart` is set.

    asked: what the command asks for. Raises KimiError for an unreadable run, and for one with other versions, on
    another machine or of something else.
    """
    here = Machine.detect()
    place = f"{host()['processor']}, {len(here.devices)} GPUs{f' {here.gpu.name}' if here.gpu else ''}"
    identity = {**installed_versions(), "commit": git_commit() or "none", "machine": place, **asked}
    earlier = sorted(runs.glob(f"*-{AcceptResult.kind}*/{RECORD}"))
    if restart or not earlier:
        run = AcceptFolder.begin(AcceptResult.kind, runs, gpus=list(map(asdict, here.devices)))
        run.save(AcceptResult(identity, started=run.record["started"]))
        return run
    try:
        run = AcceptFolder.open(earlier[-1].parent, AcceptResult)
        before = run.result.identity
        names = sorted(name for name in identity.keys() | before.keys() if identity.get(name) != before.get(name))
        if names:
            changes = (f"{name} is {identity.get(name)}, was {before.get(name)}" for name in names)
            raise KimiError(f"the conditions have changed: {'; '.join(changes)}", where=str(run.folder))
    except KimiError as error:
        error.remedy = "start a new run with --restart, which keeps the earlier one"
        raise
    return run


def run_stages(stages: Sequence[Stage], run: AcceptFolder, say: Callable[[str], None]) -> None:
    """Run the stages that are not done yet, in order, and record the result of each.

    A failure is recorded and the next stage runs. Raises KimiError at the end if the run is not accepted. An
    interrupted stage is not recorded and runs again.
    """
    result = run.result
    done, refused = result.names(*DONE), result.names(*REFUSED)
    began, todo = time.monotonic(), [stage for stage in stages if not stage.missing and stage.name not in done]
    for stage in stages:
        if stage.missing:
            result.add(stage, StageResult(stage.missing, Verdict.NOT_RUN))
        elif stage.name in done:
            say(f"{stage.name}: {WORDS[result.stages[stage.name].verdict]} before")
        elif stage.name not in refused:
            result.add(stage, StageResult("not reached", Verdict.NOT_RUN))
    run.save()
    say(f"timetable: about {sum(stage.minutes for stage in todo):.0f} min")
    for stage in todo:
        say(f"{stage.minutes:6g} min  {stage.name}")
    for number, stage in enumerate(todo):
        left = sum(later.minutes for later in todo[number:])
        clock = f"{(time.monotonic() - began) / 60:.0f} min so far, about {left:.0f} to go"
        say(f"[{number + 1}/{len(todo)}] {stage.name} ({clock})")
        found = _result(stage, run.folder)
        result.add(stage, found)
        run.save()
        if found.verdict is not Verdict.PASS:
            say(f"{stage.name}: {WORDS[found.verdict]}: {found.found}")
    if not result.accepted:
        remedy = "mend it and repeat the command, which runs only the stages that failed, were slow or have not run"
        raise KimiError(result.headline, remedy=remedy)


def _result(stage: Stage, folder: Path) -> StageResult:
    began = time.monotonic()
    try:
        found = stage.run()
    except Skipped as reason:
        found = StageResult(reason.what, Verdict.NOT_RUN)
    except KimiError as error:
        found = StageResult(str(error), Verdict.FAIL)
    except Exception as error:  # the other stages, the page and the bundle must not suffer from it
        (folder / "traceback.txt").write_text(traceback.format_exc())
        found = StageResult(f"{type(error).__name__}: {error}; report it and attach the bundle", Verdict.FAIL)
    return replace(found, seconds=time.monotonic() - began)
