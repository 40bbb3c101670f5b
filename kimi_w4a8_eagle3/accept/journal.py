"""Results of all stages in one file, so that a second run continues where the first one stopped."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from ..base.errors import KimiError
from ..base.run_dir import git_commit, installed_versions, new_run_dir, write_json
from ..base.signals import Terminated

JOURNAL = "journal.json"
KIND = "accept"


class Figure(BaseModel):
    """Measured figure with its prediction and published value, if any."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    published: float | None = None


class Outcome(BaseModel):
    """Result of a stage, as a sentence and figures."""

    state: Literal["passed", "failed", "not run"]
    found: str
    seconds: float = 0.0
    figures: list[Figure] = []


@dataclass(frozen=True)
class Stage:
    """One step of the run. proves: claim it settles, "" for none. missing: why it cannot run here, "" if it can.

    run returns a sentence and figures, or raises KimiError.
    """

    name: str
    proves: str
    run: Callable[[], tuple[str, list[Figure]]]
    missing: str = ""


class Journal(BaseModel):
    """Journal file. identity: versions and sizes; results under another identity do not count."""

    identity: dict[str, str]
    outcomes: dict[str, Outcome] = {}

    def save(self, folder: Path) -> None:
        write_json(folder / JOURNAL, self.model_dump(mode="json"))


def open_journal(runs: Path, sizes: str, restart: bool) -> tuple[Path, Journal]:
    """Return the newest journal under `runs` and its folder, or a new one if there is none or `restart` is set.

    Raises KimiError for an unreadable journal and for one with other versions or sizes.
    """
    identity = {**installed_versions(), "commit": git_commit() or "none", "sizes": sizes}
    earlier = sorted(runs.glob(f"*-{KIND}*/{JOURNAL}"))
    if restart or not earlier:
        folder, journal = new_run_dir(KIND, runs), Journal(identity=identity)
        journal.save(folder)
        return folder, journal
    remedy = "start a new run with --restart, which keeps the earlier one"
    try:
        journal = Journal.model_validate_json(earlier[-1].read_text())
    except (OSError, ValidationError) as error:
        raise KimiError(f"cannot read the journal: {error!s:.200}", where=str(earlier[-1]), remedy=remedy) from None
    names = sorted(identity.keys() | journal.identity.keys())
    changed = [name for name in names if identity.get(name) != journal.identity.get(name)]
    if changed:
        changes = (f"{name} is {identity.get(name)}, was {journal.identity.get(name)}" for name in changed)
        raise KimiError(f"the conditions have changed: {'; '.join(changes)}", where=str(earlier[-1]), remedy=remedy)
    return earlier[-1].parent, journal


def run_stages(stages: Sequence[Stage], journal: Journal, folder: Path, say: Callable[[str], None]) -> None:
    """Run the stages that have not passed yet, in order, up to the first failure; save the journal after each.

    Raises the KimiError of the failed stage. An interrupted stage is not recorded and runs again.
    """
    for number, stage in enumerate(stages, start=1):
        head, earlier = f"[{number}/{len(stages)}] {stage.name}", journal.outcomes.get(stage.name)
        if earlier is not None and earlier.state == "passed":
            say(f"{head}: passed before")
            continue
        if stage.missing:
            journal.outcomes[stage.name] = Outcome(state="not run", found=stage.missing)
            continue
        say(head)
        began, failure = time.monotonic(), None
        try:
            found, figures = stage.run()
        except Terminated:
            raise
        except Exception as error:  # the page and the bundle are made even after an unexpected error
            (folder / "traceback.txt").write_text(traceback.format_exc())
            unexpected = KimiError(f"{type(error).__name__}: {error}", remedy="report it and attach the bundle")
            failure = error if isinstance(error, KimiError) else unexpected
            found, figures = str(failure), []
        journal.outcomes[stage.name] = Outcome(
            state="failed" if failure else "passed", found=found, seconds=time.monotonic() - began, figures=figures
        )
        journal.save(folder)
        if failure:
            remedy = "; then ".join(filter(None, (failure.remedy, "repeat the command to resume with this stage")))
            raise replace(failure, what=f"{stage.name} failed: {failure.what}", remedy=remedy)
    journal.save(folder)
