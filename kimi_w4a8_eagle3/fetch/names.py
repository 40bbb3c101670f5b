"""Names that come from outside, as types that cannot hold anything else.

A Hub, a manifest or a cache that somebody else wrote decides these texts, and they become parts of paths, addresses
and messages. So they are parsed once, here: whoever holds one of these types needs no further check.
"""

from __future__ import annotations

import re
from typing import TypeVar

from huggingface_hub.utils import HFValidationError, validate_repo_id

_T = TypeVar("_T", bound="Name")


class Name(str):
    """A text of one kind; making one of anything else is a ValueError that shows it, shortened and escaped."""

    __slots__ = ()
    kind = "name"

    def __new__(cls: type[_T], value: object) -> _T:
        """Parse `value`."""
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} instead of a {cls.kind}")
        if not cls.accepts(value):
            raise ValueError(f"{value[:100]!a} is not a {cls.kind}")
        return super().__new__(cls, value)

    @classmethod
    def accepts(cls, value: str) -> bool:
        """Whether `value` is of this kind."""
        raise NotImplementedError


class Commit(Name):
    """A git commit: 40 lower-case hexadecimal digits."""

    __slots__ = ()
    kind = "commit (40 hexadecimal digits)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        """40 lower-case hexadecimal digits."""
        return re.fullmatch(r"[0-9a-f]{40}", value) is not None


class Digest(Name):
    """A SHA-1 or SHA-256: 40 or 64 lower-case hexadecimal digits."""

    __slots__ = ()
    kind = "digest (40 or 64 hexadecimal digits)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        """40 or 64 lower-case hexadecimal digits."""
        return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value) is not None


class Revision(Name):
    """A branch, tag or commit: the part of a path below `refs/`."""

    __slots__ = ()
    kind = "revision"

    @classmethod
    def accepts(cls, value: str) -> bool:
        """A relative POSIX path that stays below where it starts."""
        return _stays_below(value)


class RepoPath(Name):
    """The path of a file in a repository: relative, with `/` only."""

    __slots__ = ()
    kind = "path inside a repository"

    @classmethod
    def accepts(cls, value: str) -> bool:
        """A relative POSIX path that stays below where it starts."""
        return _stays_below(value)


class RepoName(Name):
    """`owner/name`, as the Hub allows it."""

    __slots__ = ()
    kind = "repository name (owner/name)"

    @classmethod
    def accepts(cls, value: str) -> bool:
        """What huggingface_hub accepts."""
        try:
            validate_repo_id(value)
        except HFValidationError:
            return False
        return True


def _stays_below(value: str) -> bool:
    """A relative path without tricks. 240 bytes a part: file systems take 255, and we append suffixes.

    `isprintable` excludes NUL, control characters, surrogates and the marks that turn text around on a screen.
    """
    parts = value.split("/")
    return (
        value.isprintable()
        and "\\" not in value
        and not re.match(r"[A-Za-z]:", value)
        and len(value.encode()) <= 1024
        and len(parts) <= 32
        and all(part not in ("", ".", "..") and len(part.encode()) <= 240 for part in parts)
    )
