"""Problems of a checkpoint, as checks collect and users read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..base.errors import KimiError
from ..base.finding import Finding, Severity
from .safetensors_header import TensorInfo

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
        rest = f" and {self.count - len(self.tensors):,} more" if self.count > len(self.tensors) else ""
        return f"{self.found}: {', '.join(self.tensors)}{rest}" if self.tensors else self.found

    def error(self) -> KimiError:
        return replace(super().error(), what=self.message)


class Findings:
    """Collects the problems of one check; those that differ only in the tensor become one.

    where, remedy: of problems that name none. A tensor of a file brings its file.
    """

    def __init__(self, check: str, where: Path, remedy: str = "") -> None:
        self._new = Problem("", name=check, where=str(where), remedy=remedy, count=0)
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, what: str, expected: str, tensor: TensorInfo | str = "", remedy: str = "") -> None:
        """Add a mistake, if it concerns one in a tensor or in a name of one."""
        name, where = (tensor.name, str(tensor.file)) if isinstance(tensor, TensorInfo) else (tensor, self._new.where)
        new = replace(self._new, found=what, expected=expected, where=where, remedy=remedy or self._new.remedy)
        problem = self._problems.get((what, expected), new)
        more = (name,) if name and len(problem.tensors) < _EXAMPLES else ()
        self._problems[what, expected] = replace(problem, count=problem.count + 1, tensors=problem.tensors + more)

    def problems(self) -> list[Problem]:
        """Return all problems in the order in which they were first seen."""
        return list(self._problems.values())
