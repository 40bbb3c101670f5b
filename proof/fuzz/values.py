"""Values for a field: every type of JSON in every form that is coerced into another, and samples of a schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

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
# One kind after the other, so that a field that is seen eight times has seen each.
KINDS: tuple[tuple[Any, ...], ...] = (
    (None,),
    (True, False),
    _COERCED,
    _INTEGERS,
    _FLOATS,
    _LISTS,
    _OBJECTS,
    _TEXTS,
)
# What stands where OpenAPI says no more than "object": a JSON schema.
_SCHEMAS: tuple[Any, ...] = (
    *(True, {}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/x"}, {"type": "nope"}, {"enum": []}, {"not": {}}),
    *({"const": None}, {"anyOf": []}, {"allOf": [{}]}, {"type": "string", "pattern": "(a"}),
    *({"type": "string", "minLength": 10**6}, {"type": "integer", "minimum": 10**30}, {"type": []}),
    *({"type": "array", "minItems": 10**6}, {"type": "object", "properties": {"a": {"type": "integer"}}}),
)
_SCHEMA_NAMES = frozenset({"schema", "parameters", "input_schema", "json_schema"})
_DEPTH = 4


@dataclass(frozen=True)
class Place:
    """Where a value may stand in a body, and how: wrap(value) is the field with the value in its place."""

    field: str
    label: str
    wrap: Callable[[Any], Any]


class Shapes:
    """Reads the schemas of an OpenAPI document. forbidden_url: an address that nothing may ever ask."""

    def __init__(self, openapi: Mapping[str, Any], forbidden_url: str) -> None:
        self._schemas: Mapping[str, Schema] = openapi.get("components", {}).get("schemas", {})
        self._addresses = (forbidden_url, "file:///etc/passwd", "/etc/passwd", "data:image/png;base64,AAAA")

    def body(self, operation: Mapping[str, Any]) -> Schema:
        """The schema of an operation's JSON body, empty where it describes none."""
        content = operation.get("requestBody", {}).get("content", {})
        return self._resolved(content.get("application/json", {}).get("schema", {}))

    def places(self, schema: Schema) -> list[Place]:
        """Every field of an object, and what is inside of it to four levels, through lists and alternatives."""
        found: dict[tuple[str, str], Place] = {}
        for name, inner in self._resolved(schema).get("properties", {}).items():
            for path, wrap in self._inside(inner, _DEPTH - 1):
                label = "/".join((name, *path))
                found.setdefault((label, json.dumps(wrap("?"))), Place(name, label, wrap))
        return list(found.values())

    def sample(self, schema: Schema, random: Random, wrong: float, name: str = "", depth: int = 6) -> Any:
        """A value of the schema, in which each part is with probability `wrong` any value at all."""
        schema = self._resolved(schema)
        if random.random() < wrong or depth == 0:
            return anything(random)
        if name in _SCHEMA_NAMES and "properties" not in schema:
            return random.choice(_SCHEMAS)
        if alternatives := self._alternatives(schema):
            return self.sample(random.choice(alternatives), random, wrong, name, depth - 1)
        if "enum" in schema or "const" in schema:
            return random.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "array":
            items = range(random.choice((0, 1, 1, 2)))
            return [self.sample(schema.get("items", {}), random, wrong, name, depth - 1) for _ in items]
        if kind == "object":
            required = set(schema.get("required", ()))
            return {
                each: self.sample(inner, random, wrong, each, depth - 1)
                for each, inner in schema.get("properties", {}).items()
                if each in required or random.random() < 0.3
            }
        if kind == "string":
            return random.choice(self._addresses) if "url" in name or name == "data" else random.choice(_TEXTS)
        simple = {"integer": _INTEGERS, "number": _FLOATS, "boolean": (True, False), "null": (None,)}
        return random.choice(simple[kind]) if kind in simple else anything(random)

    def _inside(self, schema: Schema, depth: int) -> Iterator[tuple[tuple[str, ...], Callable[[Any], Any]]]:
        schema = self._resolved(schema)
        yield (), lambda value: value
        if depth == 0:
            return
        for alternative in self._alternatives(schema):
            yield from self._inside(alternative, depth)
        for name, inner in schema.get("properties", {}).items():
            around = {each: self._least(schema["properties"][each]) for each in schema.get("required", ())}
            for path, wrap in self._inside(inner, depth - 1):
                yield (name, *path), partial(_member, around, name, wrap)
        if "items" in schema:
            for path, wrap in self._inside(schema["items"], depth - 1):
                yield ("0", *path), partial(_item, wrap)

    def _least(self, schema: Schema, depth: int = 6) -> Any:
        """A valid value with nothing in it that need not be there."""
        schema = self._resolved(schema)
        if "default" in schema or depth == 0:
            return schema.get("default")
        if alternatives := self._alternatives(schema):
            return self._least(alternatives[0], depth - 1)
        if "enum" in schema or "const" in schema:
            return (schema.get("enum") or [schema["const"]])[0]
        properties = schema.get("properties", {})
        least = {name: self._least(properties.get(name, {}), depth - 1) for name in schema.get("required", ())}
        simple = {"array": [], "string": "x", "integer": 1, "number": 1.0, "boolean": False, "null": None}
        return simple.get(schema.get("type", "object"), least)

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _alternatives(self, schema: Schema) -> list[Schema]:
        return [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]


def _member(around: Mapping[str, Any], name: str, wrap: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {**around, name: wrap(value)}


def _item(wrap: Callable[[Any], Any], value: Any) -> list[Any]:
    return [wrap(value)]


def form(visit: int, random: Random) -> Any:
    """A value for a field that is visited for the `visit`-th time: a kind after the other, any of its forms."""
    return random.choice(KINDS[visit % len(KINDS)])


def anything(random: Random, depth: int = 3) -> Any:
    """A value of any type, lists and objects of such values with it."""
    if depth and random.random() < 0.2:
        items = [anything(random, depth - 1) for _ in range(random.randrange(4))]
        return items if random.random() < 0.5 else {str(form(7, random)): each for each in items}
    return form(random.randrange(len(KINDS)), random)
