"""The state of a file with respect to an edit, and the interface of edits."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class State(str, Enum):
    """The state of one file with respect to one edit."""

    ORIGINAL = "original"  # the structure is there, unedited: apply() may be called
    APPLIED = "applied"  # the edit is in place
    UPSTREAM = "upstream"  # upstream has fixed the file itself
    PREDATES = "predates"  # the file is older than the edited feature: nothing to do
    UNKNOWN = "unknown"  # not recognised: never written to


class Edit(Protocol):
    """One change of one file, as a pure function of the file's bytes."""

    def inspect(self, source: bytes) -> tuple[State, str]:
        """Return the state of `source`, and the reason for a reader."""
        ...

    def apply(self, source: bytes) -> bytes:
        """Return the edited file, which inspects as APPLIED; call it only when `inspect` returns ORIGINAL."""
        ...
