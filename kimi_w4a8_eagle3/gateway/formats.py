"""Response formats of OpenAI's and Anthropic's clients, as grammars."""

from __future__ import annotations

from typing import Any

import orjson

from .bodies import characters
from .conversation import Grammar
from .errors import Refusal
from .grammar import checked_text, schema_grammar

# Parts of structural tags that contain a grammar of their own, or repeat any other part, including one another.
_CLOSED_PARTS = ("grammar", "ebnf", "lark", "repeat", "plus", "star")


def format_of(given: Any, name: str) -> Grammar | None:
    """Return the grammar of a response format in the form of any API; None for text."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise Refusal(f"{name} must be an object", param=name)
    kind = given.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type":"object"}')
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        inner = inner if isinstance(inner, dict) else {}
        return schema_grammar(inner.get("schema"), name, inner.get("strict"))
    if kind == "structural_tag":
        return structural_tag(orjson.dumps(given).decode(), name)
    raise Refusal(f"{name} has the type {kind!r:.40}; text, json_object and json_schema are read", param=name)


def grammar_in(request: Any) -> Grammar | None:
    """Return the grammar that the fields of a completion ask for."""
    if given := format_of(request.response_format, "response_format"):
        return given
    if request.regex is not None:
        return Grammar("regex", checked_text(request.regex, "regex"))
    schema = getattr(request, "json_schema", None)
    return None if schema is None else schema_grammar(_parsed(schema, "json_schema"), "json_schema")


def structural_tag(text: str, name: str) -> Grammar:
    """Return the grammar of a structural tag."""
    waiting = [_parsed(text, name)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("type") in _CLOSED_PARTS:
                raise Refusal(f"{name} holds a {part['type']}, which is not for clients", param=name)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return Grammar("structural_tag", checked_text(text, name))


def _parsed(text: str, name: str) -> Any:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"{name} is not JSON: {str(error)[:200]}", param=name) from None
    characters(parsed)  # as deep as a body may be
    return parsed
