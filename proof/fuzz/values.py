"""Values for fields: every type of JSON in every form that is coerced into another, and values of a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]

_TEXTS = (
    *("", " ", "x", "\x00", "\ud800", "a\udfffb", "﷽" * 50, "e" + "\u0301" * 500, "A" * 200_000, "0" * 5000),
    *("<|im_end|>", "<|im_user|>", "[BOS]", "<|media_pad|>", "<|tool_calls_section_begin|>"),
    *("(", "(a+)+$", "[", "a{1000000}", "(?P<x>a)(?P=x)", "\\", "^$"),
    *("{", "{}", '{"$ref": "#"}', '{"type": "nope"}', "root ::= root", "{{ 7*7 }}", "{% raw %}"),
    *("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "data:image/png;base64,AAAA", "data:,"),
)
# Texts that pydantic reads as numbers and truths.
_COERCED = ("5", "5000", "1000000000", "-1", "5000.0", "1e9", " 7 ", "1_000", "true", "off", "null", "NaN", "-Infinity")
_INTEGERS = (0, 1, 5, -1, 129, 5000, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30)
_FLOATS = (0.5, 0.0, 5000.0, -0.0, 1e-300, 1e39, 1.7e308, -1e308, 1.0000001, float("nan"), float("inf"))
_LISTS: tuple[Any, ...] = (
    *([], [None], [[]], [{}], [5], [5000], [-1], ["5"], ["5000"], ["x"], [1, "x"], [[1]], [True], [0.5], [2**63]),
    json.loads("[1," + "[" * 400 + "]" * 400 + "]"),
    [{"type": []}],
    [["x", {"type": {}}]],
)
_OBJECTS: tuple[Any, ...] = (
    *({}, {"a": 5}, {"": None}, {"type": {}}, {"type": []}, {"1": 1e39}, {"-1": 1}, {"x": "y"}, {"name": None}),
    json.loads('{"a":' * 60 + "1" + "}" * 60),
)
KINDS: tuple[tuple[Any, ...], ...] = (
    *((None,), (True, False), _COERCED, _INTEGERS, _FLOATS, _LISTS, _OBJECTS, _TEXTS),
)
SIMPLE = st.one_of(*map(st.sampled_from, KINDS))
# Any value, and lists and objects of such values.
ANYTHING = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([text for text in _TEXTS if len(text) < 1000]), inner, max_size=3)
    ),
    max_leaves=6,
)
# For fields of which OpenAPI says no more than "object": a JSON schema.
_SCHEMAS: tuple[Any, ...] = (
    *(True, {}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"}, {"type": "nope"}, {"enum": []}, {"not": {}}),
    *({"const": None}, {"anyOf": []}, {"allOf": [{}]}, {"type": "string", "pattern": "(a"}),
    *({"type": "string", "minLength": 10**6}, {"type": "integer", "minimum": 10**30}, {"type": []}),
    *({"type": "array", "minItems": 10**6}, {"type": "object", "properties": {"a": {"type": "integer"}}}),
)
_SCHEMA_NAMES = frozenset({"schema", "parameters", "input_schema", "json_schema"})


class Bodies:
    """Values of the schemas in an OpenAPI document. forbidden_url: an address that nothing may ever ask."""

    def __init__(self, openapi: Mapping[str, Any], forbidden_url: str) -> None:
        self._schemas: Mapping[str, Schema] = openapi.get("components", {}).get("schemas", {})
        self._addresses = (forbidden_url, "file:///etc/passwd", "/etc/passwd", "data:image/png;base64,AAAA")

    def body(self, operation: Mapping[str, Any]) -> Schema:
        """Return the schema of an operation's JSON body, empty where it describes none."""
        content = operation.get("requestBody", {}).get("content", {})
        return self._resolved(content.get("application/json", {}).get("schema", {}))

    def draw(self, draw: st.DrawFn, schema: Schema, wrong: int, name: str = "", depth: int = 6) -> Any:
        """Draw a value of the schema. One of `wrong` parts (0: none) may have any value at all."""
        schema = self._resolved(schema)
        if depth == 0 or (wrong and draw(st.integers(0, wrong - 1)) == wrong - 1):
            return draw(ANYTHING)
        if name in _SCHEMA_NAMES and "properties" not in schema:
            return draw(st.sampled_from(_SCHEMAS))
        if alternatives := [one for kind in ("anyOf", "oneOf", "allOf") for one in schema.get(kind, ())]:
            return self.draw(draw, draw(st.sampled_from(alternatives)), wrong, name, depth - 1)
        if "enum" in schema or "const" in schema:
            return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
        kind = schema.get("type")
        if kind == "array":
            items = range(draw(st.sampled_from((1, 0, 2))))
            return [self.draw(draw, schema.get("items", {}), wrong, name, depth - 1) for _ in items]
        if kind == "object":
            members = schema.get("properties", {})
            kept = [one for one in members if one in schema.get("required", ()) or draw(st.integers(0, 3)) == 3]
            return {member: self.draw(draw, members[member], wrong, member, depth - 1) for member in kept}
        if kind == "string":
            return draw(st.sampled_from(self._addresses if "url" in name or name == "data" else _TEXTS))
        simple = {"integer": _INTEGERS, "number": _FLOATS, "boolean": (True, False), "null": (None,)}
        return draw(st.sampled_from(simple[kind])) if kind in simple else draw(ANYTHING)

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema
