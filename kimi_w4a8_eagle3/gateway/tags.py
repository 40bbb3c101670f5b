"""Structural tags, xgrammar's grammars of answers with calls, as plain objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|.)", re.DOTALL)
Tag = dict[str, Any]


def one_call(tag: Tag) -> Tag:
    """Return the tag with lists of calls that end after the first."""
    lists = ("triggered_tags", "tags_with_separator")
    return _changed(tag, lambda part: {**part, "stop_after_first": True} if part.get("type") in lists else part)


def compact(tag: Tag, grammar_of: Callable[[Any], str]) -> Tag:
    """Return the tag with a grammar in place of each JSON schema.

    xgrammar prints `ße` as `\\xdfe` and reads another character there, so the grammar gets the characters themselves.
    """

    def change(part: Tag) -> Tag:
        if part.get("type") != "json_schema" or part.get("style", "json") != "json":
            return part
        return {"type": "grammar", "grammar": _ESCAPE.sub(_character, grammar_of(part["json_schema"]))}

    return _changed(tag, change)


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    return chr(int(digits, 16)) if digits else escape[0]


def _changed(part: Any, change: Callable[[Tag], Tag]) -> Any:
    if isinstance(part, list):
        return [_changed(inner, change) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":  # what is in a schema is no tag
        return change(part)
    return {name: _changed(inner, change) for name, inner in change(part).items()}
