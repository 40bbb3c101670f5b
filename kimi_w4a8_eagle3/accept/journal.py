"""What every stage found, kept in one file, so that a second run goes on where the first one stopped."""

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
    """A measured figure beside what the machine model predicts and what somebody published, where either speaks."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    published: float | None = None


class Outcome(BaseModel):
    """What a stage found, in a sentence and in figures."""

    state: Literal["passed", "failed", "not run"]
    found: str
    seconds: float = 0.0
    figures: list[Figure] = []


@dataclass(frozen=True)
class Stage:
    """One step. proves: the claim that it is about, "" for none; missing: why it cannot run here, "" when it can.

    run returns a sentence and figures, or raises KimiError.
    """

    name: str
    proves: str
    run: Callable[[], tuple[str, list[Figure]]]
    missing: str = ""


class Journal(BaseModel):
    """The file. identity: versions and sizes; what was found under others does not count."""

    identity: dict[str, str]
    outcomes: dict[str, Outcome] = {}

    def save(self, folder: Path) -> None:
        """Write it whole."""
        write_json(folder / JOURNAL, self.model_dump(mode="json"))


def open_journal(runs: Path, sizes: str, restart: bool) -> tuple[Path, Journal]:
    """The newest journal under `runs`, or a new one where there is none or with `restart`; and its folder.

    Raises KimiError for a journal that cannot be read, or was written by other versions or with other sizes.
    """
    identity = {**installed_versions(), "commit": git_commit() or "none", "sizes": sizes}
    earlier = sorted(runs.glob(f"*-{KIND}*/{JOURNAL}"))
    if restart or not earlier:
        folder, journal = new_run_dir(KIND, runs), Journal(identity=identity)
        journal.save(folder)
        return folder, journal
    remedy = "--restart begins anew; nothing of the earlier run is deleted"
    try:
        journal = Journal.model_validate_json(earlier[-1].read_text())
    except (OSError, ValidationError) as error:
        raise KimiError(f"the journal cannot be read: {error!s:.200}", where=str(earlier[-1]), remedy=remedy) from None
    names = sorted(identity.keys() | journal.identity.keys())
    changed = [name for name in names if identity.get(name) != journal.identity.get(name)]
    if changed:
        told = (f"{name} is {identity.get(name)}, was {journal.identity.get(name)}" for name in changed)
        raise KimiError(f"not what the run began with: {'; '.join(told)}", where=str(earlier[-1]), remedy=remedy)
    return earlier[-1].parent, journal


def run_stages(stages: Sequence[Stage], journal: Journal, folder: Path, say: Callable[[str], None]) -> None:
    """Run what has not passed yet, in order, up to the first that fails; the journal is saved after each.

    Raises the KimiError of the stage that failed. One that is interrupted leaves no trace and runs again.
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
        except Exception as error:  # also what nobody foresaw: the page and the bundle are made all the same
            (folder / "traceback.txt").write_text(traceback.format_exc())
            unforeseen = KimiError(f"{type(error).__name__}: {error}", remedy="report it, with the bundle")
            failure = error if isinstance(error, KimiError) else unforeseen
            found, figures = str(failure), []
        journal.outcomes[stage.name] = Outcome(
            state="failed" if failure else "passed", found=found, seconds=time.monotonic() - began, figures=figures
        )
        journal.save(folder)
        if failure:
            remedy = "; then ".join(filter(None, (failure.remedy, "the same command goes on with this stage")))
            raise replace(failure, what=f"{stage.name} failed: {failure.what}", remedy=remedy)
    journal.save(folder)
