"""Finding of a check: of a recipe, a machine, a checkpoint, a server's answers or a stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .errors import KimiError


class Severity(str, Enum):
    """`warn`: it runs, but slower or less safely. `fail`: it cannot run. `skip`: the check does not apply.

    `note`: a difference from the published command, with its reason. `override`: the operator asked for it.
    """

    OK = "ok"
    NOTE = "note"
    OVERRIDE = "override"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


STYLES = dict.fromkeys(Severity, "dim") | {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}
LABELS = dict.fromkeys(Severity, "") | {Severity.WARN: "warning: ", Severity.FAIL: "refused: "}
STYLES[Severity.OVERRIDE], LABELS[Severity.OVERRIDE] = "cyan", "override: "


@dataclass(frozen=True)
class Finding:
    """Sentence about what was found, with the name of the check, "" for a remark."""

    found: str
    severity: Severity = Severity.NOTE
    name: str = ""
    where: str = ""
    expected: str = ""
    remedy: str = ""

    @property
    def passed(self) -> bool:
        return self.severity is not Severity.FAIL

    def error(self) -> KimiError:
        """Return the finding as the error that a user sees."""
        return KimiError(self.found, self.where, self.expected, self.remedy)


def checked(name: str, found: str, expected: str, passed: bool) -> Finding:
    """Return the finding of a check that passes or fails."""
    return Finding(found, Severity.OK if passed else Severity.FAIL, name, expected=expected)
