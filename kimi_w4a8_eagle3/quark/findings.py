"""Problems that a check finds: one entry per kind of mistake, with its tensors counted instead of repeated."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base.errors import KimiError

_EXAMPLES = 3


@dataclass
class Problem:
    """One kind of mistake in a checkpoint, with the names of its first tensors and the `count` of all of them."""

    check: str
    what: str
    where: str = ""
    expected: str = ""
    remedy: str = ""
    tensors: list[str] = field(default_factory=list)
    count: int = 1

    @classmethod
    def of(cls, check: str, error: KimiError) -> Problem:
        """Return the problem that an error describes."""
        return cls(check, error.what, error.where, error.expected, error.remedy)

    @property
    def message(self) -> str:
        """The problem with the names of its first tensors."""
        if not self.tensors:
            return self.what
        rest = f" and {self.count - len(self.tensors):,} more" if self.count > len(self.tensors) else ""
        return f"{self.what}: {', '.join(self.tensors)}{rest}"

    def error(self) -> KimiError:
        """Return the problem as the error that a user sees."""
        return KimiError(self.message, self.where, self.expected, self.remedy)


class Findings:
    """Collects problems; those that differ only in the tensor become one."""

    def __init__(self, check: str) -> None:
        self.check = check
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, what: str, where: object, expected: str, remedy: str = "", tensor: str | None = None) -> None:
        """Add a mistake in the file `where` and, if it concerns one, in a tensor."""
        new = Problem(self.check, what, str(where), expected, remedy, count=0)
        problem = self._problems.setdefault((what, expected), new)
        problem.count += 1
        if tensor is not None and len(problem.tensors) < _EXAMPLES:
            problem.tensors.append(tensor)

    def problems(self) -> list[Problem]:
        """Return all problems in the order in which they were first seen."""
        return list(self._problems.values())
