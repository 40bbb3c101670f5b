"""Ids of tool calls as Kimi writes them: `functions.NAME:IDX`, where IDX counts all calls of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

_ID = re.compile(r"(functions\.)?(.*?)(:\d+)?", re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
}  # fmt: skip


def flat_name(namespace: str, name: str) -> str:
    """Return the name that the model sees for a function in a group of tools, as clients write tools of MCP servers."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def named_tool(call_id: str, declared: Mapping[str, Any]) -> str | None:
    """Return the name in the id of a call that the model wrote; None when only its arguments can tell the tool.

    An id of Kimi's form names a function whether it is declared or not, and the client answers that it is unknown.
    """
    prefix, name, index = _parts(call_id)
    for written in (call_id, name + index, prefix + name, name):
        if written in declared:
            return written
    return name if prefix and index and name else None


def fitting_tool(call_id: str, arguments: str, declared: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the only tool whose parameters fit the arguments, or the name as the model wrote it."""
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    fitting = [name for name, schema in declared.items() if isinstance(given, dict) and _fits(schema, given)]
    if len(fitting) == 1 or len(declared) == 1:
        return (fitting or list(declared))[0]
    return _parts(call_id)[1] or call_id


def object_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, as an answer can hold it."""
    try:
        read = orjson.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _parts(call_id: str) -> tuple[str, str, str]:
    found = _ID.fullmatch(call_id)
    return (found[1] or "", found[2], found[3] or "") if found else ("", call_id, "")


def _fits(schema: Mapping[str, Any], given: dict[str, Any]) -> bool:
    """Compare names and their types only: a client's patterns are not run here."""
    properties = schema.get("properties") or {}
    if not set(schema.get("required") or ()) <= given.keys() <= properties.keys():
        return False
    kinds = {name: properties[name].get("type") for name in given if isinstance(properties[name], dict)}
    return all(isinstance(given[name], _TYPES.get(str(kind), object)) for name, kind in kinds.items())
