"""All conclusions from runs, computed once and read by tables, page and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..bench.runs import Groups, Run, grouped
from . import against_published, speedup
from .against_published import Comparison
from .changes import Row, Summary, compare_sides, verdicts
from .speedup import Speedup


@dataclass(frozen=True)
class Analysis:
    """Analysis of several runs. base: side that others are compared with; by default the first measured."""

    runs: Sequence[Run]
    base: str | None = None

    @cached_property
    def groups(self) -> Groups:
        """Usable measurements of each workload and concurrency, by side."""
        return grouped(self.runs)

    @cached_property
    def changes(self) -> list[Row]:
        return compare_sides(self.groups, self.base)

    @cached_property
    def verdicts(self) -> list[Summary]:
        """Comparisons of the sides, in sentences."""
        return verdicts(self.changes, self.groups)

    @cached_property
    def against_published(self) -> list[Comparison]:
        return against_published.compare(self.groups)

    @cached_property
    def measured_speedups(self) -> dict[tuple[str, int, str], Speedup]:
        """Measured speed-ups by workload, concurrency and side."""
        return speedup.measured(self.groups)

    @cached_property
    def speedups(self) -> list[Speedup]:
        """Measured and published speed-ups."""
        return [*self.measured_speedups.values(), *speedup.from_published()]
