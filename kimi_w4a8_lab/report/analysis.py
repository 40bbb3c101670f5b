"""All conclusions from runs, computed once and read by the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..speed.runs import Cell, Groups, Run, grouped
from . import against_published, speedup
from .against_published import Comparison
from .changes import Row, compare_sides
from .speedup import Speedup

CellKey = tuple[str, int, str]  # workload, concurrency, side


@dataclass(frozen=True)
class Analysis:
    """Analysis of several runs. base: side that others are compared with; by default the first measured."""

    runs: Sequence[Run]
    base: str | None = None

    @cached_property
    def groups(self) -> Groups:
        """Usable measurements of each workload and concurrency, by side."""
        return grouped(self.runs)

    @property
    def cells(self) -> Mapping[CellKey, Cell]:
        return {(*key, side): cell for key, sides in self.groups.items() for side, cell in sides.items()}

    @cached_property
    def changes(self) -> list[Row]:
        return compare_sides(self.groups, self.base)

    @cached_property
    def against_published(self) -> dict[CellKey, dict[str, Comparison]]:
        return {key: against_published.compare(cell) for key, cell in self.cells.items()}

    @cached_property
    def measured_speedups(self) -> dict[CellKey, Speedup]:
        return speedup.measured(self.groups)

    @cached_property
    def speedups(self) -> list[Speedup]:
        return [*self.measured_speedups.values(), *speedup.from_published()]
