"""Structural tags, xgrammar's grammars of answers with calls, as plain objects."""

from __future__ import annotations

from typing import Any


def one_call(tag: Any) -> Any:
    """Return the tag with lists of calls that end after the first."""
    if isinstance(tag, list):
        return [one_call(part) for part in tag]
    if not isinstance(tag, dict) or tag.get("type") == "json_schema":
        return tag
    only = {"stop_after_first": True} if tag.get("type") in ("triggered_tags", "tags_with_separator") else {}
    return {name: one_call(part) for name, part in tag.items()} | only
