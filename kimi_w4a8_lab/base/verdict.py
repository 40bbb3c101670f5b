"""Verdicts of evaluations and of stages of `accept`, and the exit codes of evaluations."""

from __future__ import annotations

from enum import Enum


class Verdict(str, Enum):
    """Result of an evaluation or stage. Of several verdicts, the last in this list decides. Runs record the value."""

    NOT_RUN = "not run"
    MEASURED = "measured"
    PASS = "pass"  # noqa: S105 a verdict, not a password
    INCONCLUSIVE = "inconclusive"
    SLOW = "slow"
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


_EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 3, Verdict.INVALID: 4, Verdict.INCONCLUSIVE: 5, Verdict.MEASURED: 6}
