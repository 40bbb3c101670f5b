"""The schemas and grammars in a body, wherever a client may write one. `trial.py` measures their cost later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from ..gateway.enforceable import require_enforceable
from .answers import Refusal
from .shape import Text

_MAX_TOOL_OBJECTS = 8192  # SGLang checks each as a schema, 0.2 ms an object, while all other requests wait
# Parts of structural tags that contain a grammar of their own, or repeat any other part, including one another.
_CLOSED_PARTS = ("grammar", "ebnf", "lark", "repeat", "plus", "star")


def check_text(grammar: str | None, name: str) -> None:
    """Check a schema or structural tag that is sent as JSON text; None is allowed."""
    if grammar is None:
        return
    try:
        parsed = orjson.loads(grammar)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"{name} is not JSON: {str(error)[:200]}", param=name) from None
    Text.of(parsed)  # as deep as a body may be
    if name == "json_schema":
        require_enforceable(parsed, name)
    else:
        _refuse_closed_parts(parsed, name)


def check_schema(grammar: Any, name: str) -> None:
    """Check a grammar that is part of the body, such as a response format; None is allowed."""
    if grammar is None:
        return
    if grammar.get("type") == "structural_tag":
        _refuse_closed_parts(grammar, name)
    wanted = grammar.get("json_schema") or grammar.get("format") or {}
    if wanted.get("strict") is not False:
        require_enforceable(wanted.get("schema"), name)


def check_tools(tools: Sequence[Any]) -> None:
    """Check all lists of tools together."""
    if sum(1 for _ in _objects(tools)) > _MAX_TOOL_OBJECTS:
        raise Refusal(f"tools hold more than {_MAX_TOOL_OBJECTS} objects", param="tools")
    for number, function in enumerate(_functions(tools)):
        if function.get("strict"):
            require_enforceable(function.get("parameters"), f"tools[{number}]")


def _functions(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the declarations in all lists of tools, in the form of any endpoint."""
    flat = [tool for tool_list in tools for tool in tool_list or () if isinstance(tool, Mapping)]
    inner = [member for tool in flat if isinstance(tool.get("tools"), list) for member in tool["tools"]]
    declared = [tool.get("function", tool) for tool in flat]
    return [function for function in (*declared, *inner) if isinstance(function, Mapping)]


def _refuse_closed_parts(tag: Any, name: str) -> None:
    for part in _objects(tag):
        if part.get("type") in _CLOSED_PARTS:
            raise Refusal(f"{name} holds a {part['type']}, which is not for clients", param=name)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a parsed grammar, without recursion."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield inner
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)
