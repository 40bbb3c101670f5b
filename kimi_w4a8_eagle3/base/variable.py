"""Environment variables with a type: the values that each one can have, and its text converted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from .errors import KimiError

COLLECT = "KIMI_COLLECT"  # names the folder of `draft collect`
VariableKind = Literal["bool", "int", "float", "choice", "text"]
# AITER and FlyDSL compare with exactly these spellings; "TRUE" would be read as false.
TRUE = ("1", "true", "True", "YES", "yes")
FALSE = ("0", "false", "False", "NO", "no")


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    allowed: valid values, empty for any. minimum: the smallest valid number.
    """

    name: str
    kind: VariableKind
    allowed: tuple[Any, ...] = ()
    minimum: float | None = None

    def parse(self, text: str) -> Any:
        """Return the typed value of `text`; raise KimiError when it is not allowed."""
        value = self._convert(text)
        if (self.allowed and value not in self.allowed) or (self.minimum is not None and value < self.minimum):
            raise self._refused(text)
        return value

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if self.kind == "bool":
            return "0 or 1"
        if self.allowed:
            return ", ".join(str(value) for value in self.allowed)
        least = "" if self.minimum is None else f" >= {self.minimum:g}"
        return {"int": "a whole number", "float": "a number", "choice": "", "text": "any text"}[self.kind] + least

    def _convert(self, text: str) -> Any:
        if self.kind == "bool":
            if text not in (*TRUE, *FALSE):
                raise self._refused(text)
            return text in TRUE
        if self.kind == "int" and not re.fullmatch("-?[0-9]+", text):  # Python also reads 1_000 and other digits
            raise self._refused(text)
        try:
            return {"int": int, "float": float}.get(self.kind, str)(text)
        except ValueError:
            raise self._refused(text) from None

    def _refused(self, text: str) -> KimiError:
        return KimiError(f"{self.name}={text!r} is not allowed", where="environment", expected=self.expected)
