"""The nearest valid name for a misspelt one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `valid`, or an empty string when none is close."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
