"""What an edit says about one file."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class State(str, Enum):
    """The state of one file with respect to one edit."""

    ORIGINAL = "original"  # the structure is there, unedited: apply() may be called
    APPLIED = "applied"  # the edit is in place
    UPSTREAM = "upstream"  # the file already does by itself what the edit is for
    PREDATES = "predates"  # older than the feature that is edited: nothing to do here
    UNKNOWN = "unknown"  # not recognised: never written to


class Edit(Protocol):
    """One change of one file, as a pure function of the file's bytes."""

    def inspect(self, source: bytes) -> tuple[State, str]:
        """The state of `source` and, for a reader, why."""
        ...

    def apply(self, source: bytes) -> bytes:
        """The edited file; only called when `inspect` says ORIGINAL. The result inspects as APPLIED."""
        ...
