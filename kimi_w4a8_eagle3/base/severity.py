"""Severity of a finding: of a recipe's note, a known fault, or one of doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
class Note:
    """One sentence about a launch."""

    text: str
    severity: Severity = Severity.NOTE
