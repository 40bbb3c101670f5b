"""JSON schemas drawn from a seed, made of what xgrammar holds an answer to; and some that no answer can follow.

The keywords are those of Moonshot's own flavour, on which its vendor verifier draws, and the limits that clients set:
types and lists of them, properties, required, additionalProperties, items, anyOf, enum, const, $defs with references,
recursive ones too, lengths, ranges, patterns, formats, titles.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

# No quotes or backslashes: xgrammar 0.2.1 does not compile them in every place (docs/apis.md).
_NAMES = ("a", "answer", "unit", "first name", "größe", "数", "🍎", "items", "type", "not")
_TEXTS = ("apples", "", "a b", "ä", "数", "🍎", 'q"', "\\n", "</think>", "<|tool_call_end|>")
_PATTERNS = ("^[a-c]{1,3}$", "^\\d{2}-\\d{2}$", "^(yes|no)$")
_FORMATS = ("date", "time", "uuid", "ipv4")
_REFERENCE = {"$ref": "#/$defs/node"}

IMPOSSIBLE: dict[str, Schema] = {
    "a range without numbers": {"type": "integer", "minimum": 5, "maximum": 2},
    "a length without texts": {"type": "string", "minLength": 5, "maxLength": 2},
    "more items than there may be": {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 1},
    "no value to choose": {"enum": []},
    "no alternative": {"anyOf": []},
    "an unknown type": {"type": "nope"},
    "a required property that nothing fits": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "a reference to another server": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a reference to itself": {"$ref": "#"},
    "a pattern that is none": {"type": "string", "pattern": "("},
}
# Accepted by xgrammar and not held: an answer may violate them, so that they are refused.
NOT_HELD: dict[str, Schema] = {
    "not": {"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "a minimum below zero alone": {"type": "integer", "minimum": -5},
    "contains": {"type": "array", "contains": {"const": 3}},
    "dependencies": {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
    "$dynamicRef": {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}},
    "a tuple of draft-07": {"type": "array", "items": [{"type": "string"}, {"type": "number"}]},
    "a limit of draft-04": {"type": "number", "minimum": 0, "maximum": 9, "exclusiveMinimum": True},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "allOf": {"allOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    "pattern and maxLength": {"type": "object", "properties": {"a": {"pattern": "^a+$", "maxLength": 2}}},
    "required without a property": {"type": "object", "required": ["a"]},
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
}


def draw(random: Random) -> Schema:
    """A schema of an object, which is what a tool takes; about one in six refers to itself."""
    schema = _object(random, depth=2)
    if random.random() < 1 / 6:
        node = {"type": "object", "properties": {"v": _leaf(random), "next": {"anyOf": [{"type": "null"}, _REFERENCE]}}}
        schema["$defs"] = {"node": {**node, "required": ["v", "next"], "additionalProperties": False}}
        schema["properties"]["chain"] = _REFERENCE
        schema["required"] = [*schema["required"], "chain"]
    return schema


def _any(random: Random, depth: int) -> Schema:
    if depth == 0 or random.random() < 0.5:
        return _leaf(random)
    return random.choice((_object, _array, _alternatives))(random, depth - 1)


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(_NAMES, random.randint(1, 3))
    schema: Schema = {
        "type": random.choice(("object", "object", ["object"])),
        "properties": {name: _any(random, depth) for name in names},
        "required": random.sample(names, random.randint(0, len(names))),
        "additionalProperties": random.choice((False, False, False, {"type": "boolean"})),
    }
    return _titled(random, schema)


def _array(random: Random, depth: int) -> Schema:
    least = random.randint(0, 2)
    if random.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(random), _any(random, depth)], "items": False, "minItems": 2}
    return {"type": "array", "items": _any(random, depth), "minItems": least, "maxItems": least + random.randint(0, 2)}


def _alternatives(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any(random, depth) for _ in range(random.randint(1, 3))]}


def _leaf(random: Random) -> Schema:
    low = random.randint(-50, 50)
    return _titled(
        random,
        random.choice(
            (
                {"type": "integer", "minimum": low, "maximum": low + random.choice((0, 1, 9, 1000))},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 5},
                {"type": "string", "minLength": random.randint(0, 2), "maxLength": random.randint(2, 9)},
                {"type": "string", "enum": random.sample(_TEXTS, random.randint(1, 4))},
                {"type": "string", "pattern": random.choice(_PATTERNS)},
                {"type": "string", "format": random.choice(_FORMATS)},
                {"enum": random.sample((1, 2.5, True, None, "x", [1], {"k": 0}), random.randint(1, 3))},
                {"const": random.choice(_TEXTS)},
                {"type": random.choice(("boolean", "null", ["boolean", "null"]))},
                {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
                {"type": random.choice(("integer", "number", "string"))},  # without a limit: some answers are cut
            )
        ),
    )


def _titled(random: Random, schema: Schema) -> Schema:
    return schema | random.choice(({}, {}, {"title": "T"}, {"description": 'what is asked for: "it" </think>'}))
