"""Problems that a check finds: one entry per kind of mistake, with its tensors counted instead of repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base.errors import KimiError
from ..base.finding import Finding, Severity

_EXAMPLES = 3


@dataclass(frozen=True)
class Problem(Finding):
    """One kind of mistake in a checkpoint, with the names of its first tensors and the `count` of all of them."""

    severity: Severity = Severity.FAIL
    tensors: tuple[str, ...] = ()
    count: int = 1

    @classmethod
    def of(cls, check: str, error: KimiError) -> Problem:
        """Return the problem that an error describes."""
        return cls(error.what, name=check, where=error.where, expected=error.expected, remedy=error.remedy)

    @property
    def message(self) -> str:
        """The problem with the names of its first tensors."""
        if not self.tensors:
            return self.found
        rest = f" and {self.count - len(self.tensors):,} more" if self.count > len(self.tensors) else ""
        return f"{self.found}: {', '.join(self.tensors)}{rest}"

    def error(self) -> KimiError:
        return replace(super().error(), what=self.message)


class Findings:
    """Collects problems; those that differ only in the tensor become one."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, what: str, where: object, expected: str, remedy: str = "", tensor: str | None = None) -> None:
        """Add a mistake in the file `where` and, if it concerns one, in a tensor."""
        new = Problem(what, name=self.check, where=str(where), expected=expected, remedy=remedy, count=0)
        problem = self._problems.get((what, expected), new)
        more = (tensor,) if tensor is not None and len(problem.tensors) < _EXAMPLES else ()
        self._problems[what, expected] = replace(problem, count=problem.count + 1, tensors=problem.tensors + more)

    def problems(self) -> list[Problem]:
        """Return all problems in the order in which they were first seen."""
        return list(self._problems.values())
