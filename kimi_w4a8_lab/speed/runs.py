"""Run of a benchmark, saved after every measurement, and its measurements by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from kimi_w4a8_eagle3.engine.metrics import Acceptance

from ..base.run_folder import RunFolder
from .generator import LoadDetails, read_last
from .measure import Measurement
from .statistics import METRICS, Interval, Repetition, estimate
from .workloads import Point, Workload


class RunResult(BaseModel):
    """`result.json` of a benchmark. status `incomplete`: `reason` stopped it, and finished measurements remain."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["bench"] = "bench"
    status: Literal["running", "complete", "incomplete"]
    reason: str = ""
    sides: list[str]
    measurements: list[Measurement] = []


@dataclass
class Run(RunFolder[RunResult]):
    """Folder of a benchmark. `usable` leaves out measurements of crashed or failed runs."""

    details: dict[str, Repetition] = field(default_factory=dict, compare=False)

    @property
    def usable(self) -> list[Measurement]:
        return [measurement for measurement in self.result.measurements if measurement.usable]

    @property
    def refused(self) -> list[tuple[Measurement, str]]:
        """Measurements that must not be averaged, with the reason."""
        return [(found, "; ".join(found.problems)) for found in self.result.measurements if not found.usable]

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

    def repetition(self, measurement: Measurement) -> Repetition:
        """Return a measurement with its per-request details, or without them if the raw file is gone."""
        if measurement.raw not in self.details:
            path = self.folder / measurement.raw
            details = read_last(path, LoadDetails) if path.is_file() else None
            self.details[measurement.raw] = Repetition(measurement.load, details)
        return self.details[measurement.raw]


def read_run(folder: Path) -> Run:
    """Read the folder of a benchmark. Raises KimiError for any other folder and for damaged files."""
    return Run.open(folder, RunResult)


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
        repetitions = [run.repetition(found) for run, found in pairs]
        return cls(run, first.workload, first.concurrency, first.side, [found for _, found in pairs], repetitions)

    @cached_property
    def figures(self) -> dict[str, Interval]:
        return {key: estimate(self.repetitions, metric) for key, metric in METRICS.items()}

    @cached_property
    def acceptance(self) -> Acceptance | None:
        """Median over the measurements, of all their verify steps; None if the side does not speculate."""
        found = [one.acceptance for one in self.measurements if one.acceptance is not None]
        if not found:
            return None
        length, rate = (float(np.median([getattr(one, name) for one in found])) for name in ("length", "rate"))
        positions = next((one.per_position for one in found if one.per_position), ())
        return Acceptance(length, rate, sum(one.steps for one in found), positions)

    @property
    def accept_length(self) -> float | None:
        """Median over the measurements; None if the side does not speculate."""
        return self.acceptance.length if self.acceptance else None


Groups = Mapping[tuple[str, int], Mapping[str, Cell]]


def grouped(runs: Sequence[Run]) -> Groups:
    """Group cells by (workload, concurrency) and then by side, in measuring order."""
    groups: dict[tuple[str, int], dict[str, list[tuple[Run, Measurement]]]] = {}
    for run in runs:
        for found in run.usable:
            sides = groups.setdefault((found.workload.name, found.concurrency), {})
            sides.setdefault(found.side, []).append((run, found))
    return {key: {side: Cell.of(pairs) for side, pairs in sides.items()} for key, sides in groups.items()}
