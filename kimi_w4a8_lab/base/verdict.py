"""Verdicts of an evaluation, and their exit codes."""

from __future__ import annotations

from enum import Enum


class Verdict(str, Enum):
    """Result of an evaluation. Of several verdicts, the last in this list decides. Runs record the value."""

    MEASURED = "measured"
    PASS = "pass"  # noqa: S105 a verdict, not a password
    INCONCLUSIVE = "inconclusive"
    FAIL = "fail"
    INVALID = "invalid"

    def __str__(self) -> str:
        return self.value

    @property
    def exit_code(self) -> int:
        """Exit code: 0 pass, 3 fail, 4 invalid, 5 inconclusive, 6 measured."""
        return _EXIT_CODES[self]

    @property
    def headline(self) -> str:
        return "MEASURED, NOT JUDGED" if self is Verdict.MEASURED else self.value.upper()


_EXIT_CODES = {
    Verdict.PASS: 0,
    Verdict.FAIL: 3,
    Verdict.INVALID: 4,
    Verdict.INCONCLUSIVE: 5,
    Verdict.MEASURED: 6,
}
