"""A benchmark's run directory, written after every measurement and read back here or on other machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.base.run_dir import RECORD, write_json

from .generator import read_details
from .measure import Measurement
from .statistics import METRICS, Interval, Repetition, estimate
from .workloads import Point, Workload

RESULT = "result.json"


class RunResult(BaseModel):
    """`result.json` of a benchmark. status `incomplete`: `reason` stopped it, and finished measurements remain."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["bench", "ab"]
    status: Literal["running", "complete", "incomplete"]
    reason: str = ""
    sides: list[str]
    measurements: list[Measurement] = []


@dataclass
class RunWriter:
    """Writer that keeps `result.json` current, so that a killed benchmark leaves its measurements marked unfinished."""

    folder: Path
    result: RunResult

    def save(self) -> None:
        write_json(self.folder / RESULT, self.result.model_dump(mode="json"))

    def add(self, measurement: Measurement) -> None:
        self.result.measurements.append(measurement)
        self.save()

    def replace(self, old: Measurement, new: Measurement) -> None:
        self.result.measurements[self.result.measurements.index(old)] = new
        self.save()

    def measured(self, point: Point, side: str, repetition_index: int) -> bool:
        """True if this point was measured before the run was resumed."""
        at = side, point.workload.name, point.concurrency, point.seed, repetition_index
        return any(at == found.at for found in self.result.measurements)

    def close(self, error: BaseException | None = None) -> None:
        self.result.status = "complete" if error is None else "incomplete"
        self.result.reason = "" if error is None else (str(error) or type(error).__name__).splitlines()[0]
        self.save()


@dataclass(frozen=True)
class Run:
    """Run directory that was read back. `usable` leaves out measurements of crashed or failed runs."""

    folder: Path
    record: Mapping[str, Any]
    result: RunResult
    _details: dict[str, Repetition] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def usable(self) -> list[Measurement]:
        return [measurement for measurement in self.result.measurements if measurement.usable]

    @property
    def refused(self) -> list[tuple[Measurement, str]]:
        """Measurements that must not be averaged, with the reason."""
        return [(found, "; ".join(found.problems)) for found in self.result.measurements if not found.usable]

    def repetitions(self, measurements: Iterable[Measurement]) -> list[Repetition]:
        """Return the measurements with their per-request details, or without them if the raw file is gone."""
        return [self._repetition(measurement) for measurement in measurements]

    def _repetition(self, measurement: Measurement) -> Repetition:
        if measurement.raw not in self._details:
            path = self.folder / measurement.raw
            details = read_details(path) if path.is_file() else None
            self._details[measurement.raw] = Repetition(measurement.load, details)
        return self._details[measurement.raw]


def read_run(folder: Path) -> Run:
    """Read a run directory. Raises KimiError for any other folder and for damaged files."""
    try:
        content = json.loads((folder / RESULT).read_text())
        if isinstance(content, dict) and content.get("kind") not in ("bench", "ab"):
            page = folder / "report.html"
            remedy = f"open its own page, {page}" if page.is_file() else "name the folder of such a run"
            raise KimiError("this is not a run of `kimi-w4a8 bench` or `kimi-w4a8 eval`", str(folder), remedy=remedy)
        result = RunResult.model_validate(content)
        record = json.loads((folder / RECORD).read_text())
    except OSError as error:
        raise KimiError(
            f"no benchmark run here: {error.strerror}",
            where=str(error.filename or folder),
            expected=f"{RESULT}, {RECORD}",
        ) from None
    except (ValidationError, json.JSONDecodeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        detail = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ") if first else str(error)
        raise KimiError(
            f"cannot read the run directory: {detail}",
            where=str(folder),
            expected="a run directory of `kimi-w4a8 bench`",
            remedy="the run was interrupted, or is of another version or kind: measure again",
        ) from None
    return Run(folder, record, result)


@dataclass(frozen=True)
class Cell:
    """Usable measurements of one side at one workload and concurrency, from one or several runs, in order.

    run, workload: of the first measurement. repetitions: with per-request details if they were kept.
    """

    run: Run
    workload: Workload
    concurrency: int
    side: str
    measurements: Sequence[Measurement]
    repetitions: Sequence[Repetition]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Run, Measurement]]) -> Cell:
        """Make the cell of measurements with the same workload, concurrency and side."""
        run, first = pairs[0]
        repetitions = [repetition for run, found in pairs for repetition in run.repetitions([found])]
        return cls(run, first.workload, first.concurrency, first.side, [found for _, found in pairs], repetitions)

    @cached_property
    def figures(self) -> dict[str, Interval]:
        return {key: estimate(self.repetitions, metric) for key, metric in METRICS.items()}

    @cached_property
    def accept_length(self) -> float | None:
        """Median over the measurements; None if the side does not speculate."""
        lengths = [found.acceptance.length for found in self.measurements if found.acceptance is not None]
        return float(np.median(lengths)) if lengths else None


Groups = Mapping[tuple[str, int], Mapping[str, Cell]]


def grouped(runs: Sequence[Run]) -> Groups:
    """Group cells by (workload, concurrency) and then by side, in measuring order."""
    groups: dict[tuple[str, int], dict[str, list[tuple[Run, Measurement]]]] = {}
    for run in runs:
        for found in run.usable:
            sides = groups.setdefault((found.workload.name, found.concurrency), {})
            sides.setdefault(found.side, []).append((run, found))
    return {key: {side: Cell.of(pairs) for side, pairs in sides.items()} for key, sides in groups.items()}
