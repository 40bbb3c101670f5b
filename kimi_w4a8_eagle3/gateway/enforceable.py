"""Refuse JSON schemas that xgrammar compiles but does not enforce: an answer could violate them with status 200.

SGLang 0.5.23 refuses the keywords that xgrammar drops in response formats (sglang#37839); 0.5.20 refuses none. Neither
checks the schemas of strict tools, or keywords that stand beside one another. docs/apis.md lists what was
tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from .errors import Refusal


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# xgrammar 0.2.7 holds multipleOf, and a minimum below zero without a maximum. 0.2.1 does not.
_OLD = tuple(map(int, re.findall(r"\d+", metadata.version("xgrammar"))[:3])) < (0, 2, 7)
_DROPPED = names(
    "contains minContains maxContains dependentRequired dependentSchemas dependencies if then else not propertyNames "
    "uniqueItems additionalItems $dynamicRef $recursiveRef"
)
_TEXT = names("type title description")  # of propertyNames with the type string: every name is a text
_STRINGS = names("pattern minLength maxLength format")
_NUMBERS = names("minimum maximum exclusiveMinimum exclusiveMaximum")
_UPPER = names("maximum exclusiveMaximum")
_OBJECTS = names("properties patternProperties required additionalProperties minProperties maxProperties")
_ARRAYS = names("items prefixItems minItems maxItems")
# If one of these is present, xgrammar reads only the first one. It also ignores what stands beside enum and const, but
# there the client knows the allowed values.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_ASSERTIONS = frozenset(_ALONE) | _STRINGS | _NUMBERS | _OBJECTS | _ARRAYS
_COUNTS = names("minItems maxItems minLength maxLength minProperties maxProperties")
_MAX_COUNT = 2**31 - 1  # xgrammar misreads larger values
_INNER = names("additionalProperties items unevaluatedItems unevaluatedProperties")
_INNER_LISTS = names("anyOf oneOf allOf prefixItems")
_INNER_NAMED = names("properties patternProperties $defs definitions")


def require_enforceable(schema: Any, name: str) -> None:
    """Raise Refusal, with the place in the schema, where xgrammar would not enforce it."""
    if isinstance(schema, Mapping) and schema.get("$ref") == "#":
        raise Refusal(f"{name}: the schema refers only to itself, so no value fits", param=name)
    for place, subschema in schemas(schema):
        if why := _unenforceable(subschema):
            raise Refusal(f"{name}: the schema at {place} cannot be enforced: {why}", param=name)


def _unenforceable(schema: Mapping[str, Any]) -> str | None:
    if empty := next((key for key in ("enum", "anyOf", "oneOf") if schema.get(key) == []), None):
        return f"{empty} is empty, so no value fits"
    named = schema.get("propertyNames")
    any_text = isinstance(named, Mapping) and named.get("type") == "string" and named.keys() <= _TEXT
    free = {"propertyNames"} if any_text else set()
    if dropped := sorted((_DROPPED | ({"multipleOf"} if _OLD else set())) & schema.keys() - free):
        return f"{', '.join(dropped)} would be ignored"
    if isinstance(schema.get("items"), list) or any(isinstance(schema.get(key), bool) for key in _NUMBERS):
        return "older drafts are not read: write a tuple with prefixItems, and exclusiveMinimum as a number"
    if large := [key for key in _COUNTS & schema.keys() if _number(schema[key]) > _MAX_COUNT]:
        return f"{large[0]} above {_MAX_COUNT} would be misread"
    if alone := next((key for key in _ALONE if key in schema), None):
        if beside := sorted(_ASSERTIONS & schema.keys() - {alone}):
            return f"{', '.join(beside)} beside {alone} would be ignored"
        if alone == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
            return "allOf with more than one schema would be ignored"
        if alone == "$ref" and schema["$ref"] != "#" and not str(schema["$ref"]).startswith("#/"):
            return "$ref must point into this schema, as in #/$defs/NAME"
    if "enum" in schema or "const" in schema:
        return None
    if sum(bool(names(keys) & schema.keys()) for keys in ("pattern", "format", "minLength maxLength")) > 1:
        return "pattern, format and a length cannot be enforced together"
    if "type" not in schema and (loose := sorted((_STRINGS | _NUMBERS) & schema.keys())):
        return f"{', '.join(loose)} without a type would be ignored"
    low = any(_number(schema.get(key)) < 0 for key in ("minimum", "exclusiveMinimum"))
    if _OLD and low and not _UPPER & schema.keys():
        return "a minimum below zero needs a maximum beside it; alone it would allow a minus sign without a number"
    required, described = schema.get("required"), schema.get("properties")
    described = described if isinstance(described, Mapping) else {}
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in described:
            return f"required names {name!r}, which properties does not describe"
    return None


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def schemas(schema: Any, place: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema inside a schema with its place; the values of enum, const and default are not schemas."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, inner in schema.items():
        if key in _INNER:
            yield from schemas(inner, f"{place}/{key}")
        elif key in _INNER_LISTS and isinstance(inner, list):
            for number, subschema in enumerate(inner):
                yield from schemas(subschema, f"{place}/{key}/{number}")
        elif key in _INNER_NAMED and isinstance(inner, Mapping):
            for name, subschema in inner.items():
                yield from schemas(subschema, f"{place}/{key}/{name}")
