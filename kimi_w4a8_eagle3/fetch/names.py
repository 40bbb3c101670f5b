"""Names that come from outside: a Hub's answers and a user's words decide them, and they become paths."""

from __future__ import annotations

import re


def repository_path(value: object, kind: str = "path inside a repository") -> str:
    """Return a relative path that stays below the folder it is joined to; raise ValueError for any other value.

    A part has at most 240 bytes: file systems take 255, and suffixes are appended. `isprintable` excludes NUL, control
    characters, surrogates and marks that reverse the direction of text.
    """
    parts = value.split("/") if isinstance(value, str) else []
    if not (
        isinstance(value, str)
        and value.isprintable()
        and "\\" not in value
        and not re.match(r"[A-Za-z]:", value)
        and len(value.encode()) <= 1024
        and all(part not in ("", ".", "..") and len(part.encode()) <= 240 for part in parts)
    ):
        raise ValueError(f"{value!a:.100} is not a {kind}")
    return value


def hexadecimal(value: object, kind: str, *lengths: int) -> str:
    """Return a commit or digest of one of these lengths; raise ValueError for any other value."""
    if not (isinstance(value, str) and len(value) in lengths and re.fullmatch(r"[0-9a-f]+", value)):
        raise ValueError(f"{value!a:.100} is not a {kind} ({' or '.join(map(str, lengths))} hexadecimal digits)")
    return value


def commit(value: object) -> str:
    return hexadecimal(value, "commit", 40)


def digest(value: object) -> str:
    """Return a SHA-1 or SHA-256."""
    return hexadecimal(value, "digest", 40, 64)
