"""Types for names that come from outside: a Hub, a manifest or a cache decides them, and they become paths.

Each name is parsed once, when it enters. Code that holds one of these types needs no further check.
"""

from __future__ import annotations

import re
from typing import TypeVar

from huggingface_hub.utils import HFValidationError, validate_repo_id

MAX_PARTS = 32  # of a path
_T = TypeVar("_T", bound="Name")


class Name(str):
    """A string of one kind. Any other value is a ValueError that shows it, shortened and escaped."""

    kind = "name"

    def __new__(cls: type[_T], value: object) -> _T:
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} instead of a {cls.kind}")
        if not cls.accepts(value):
            raise ValueError(f"{value[:100]!a} is not a {cls.kind}")
        return super().__new__(cls, value)

    @classmethod
    def accepts(cls, value: str) -> bool:
        """Return True if `value` stays below the folder it is joined to.

        A part has at most 240 bytes: file systems take 255, and suffixes are appended. `isprintable` excludes NUL,
        control characters, surrogates and marks that reverse the direction of text.
        """
        parts = value.split("/")
        return (
            value.isprintable()
            and "\\" not in value
            and not re.match(r"[A-Za-z]:", value)
            and len(value.encode()) <= 1024
            and len(parts) <= MAX_PARTS
            and all(part not in ("", ".", "..") and len(part.encode()) <= 240 for part in parts)
        )


class RepoPath(Name):
    """Path of a file in a repository: relative, with `/` only."""

    kind = "path inside a repository"


class Revision(Name):
    """Branch, tag or commit. It becomes a path below `refs/`."""

    kind = "revision"


class Commit(Name):
    kind = "commit (40 hexadecimal digits)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", value) is not None


class Digest(Name):
    """SHA-1 or SHA-256."""

    kind = "digest (40 or 64 hexadecimal digits)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value) is not None


class RepoName(Name):
    """`owner/name`, as huggingface_hub accepts it."""

    kind = "repository name (owner/name)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        try:
            validate_repo_id(value)
        except HFValidationError:
            return False
        return True
