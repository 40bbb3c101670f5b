"""Patterns and JSON schemas whose parts are harmless one by one. The cost is in how they are put together."""

from __future__ import annotations

import json
import re
from itertools import count

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from proof.structured.schemas import Schema

_CONSTANT = re.compile(r'"const": \d+')
_LARGEST = 2**15  # characters of a schema's part, with all its copies
# Exponents, because a climb that adds one to a number then doubles the work.
TIMES = st.integers(0, 10).map(lambda exponent: 2**exponent)
_ATOMS = st.sampled_from(("a", ".", "[^a]", "[a-z]", r"\d", r"\w", r"\s", "[a-z0-9_]", "(a|b)"))


def _larger_patterns(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    repeated = st.builds("({}){{1,{}}}".format, inner, TIMES)
    return repeated | st.builds("({})*".format, inner) | st.builds("({}|{})*".format, inner, inner) | pairs(inner)


def pairs(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    """Return patterns of one repeated part and a second one."""
    return st.builds("({})+{}".format, inner, inner) | st.builds("{}{}".format, inner, inner)


PATTERNS = st.recursive(_ATOMS, _larger_patterns, max_leaves=8)


def _copies(part: Schema, times: int) -> list[Schema]:
    """Return copies of a part, as many as fit, with a different number for each constant."""
    text, numbers = json.dumps(part), count()
    times = min(times, max(1, _LARGEST // len(text)))
    if "const" not in text:
        return [part] * times
    return [json.loads(_CONSTANT.sub(lambda _: f'"const": {next(numbers)}', text)) for _ in range(times)]


def _larger_schemas(inner: SearchStrategy[Schema]) -> SearchStrategy[Schema]:
    @st.composite
    def larger(draw: st.DrawFn) -> Schema:
        copies = _copies(draw(inner), draw(TIMES))
        some, names = len(copies) // 2, {f"p{number}": copy for number, copy in enumerate(copies)}
        forms: list[Schema] = [
            {"type": "array", "items": copies[0]},
            {draw(st.sampled_from(("anyOf", "oneOf", "allOf"))): copies},
            {"type": "array", "items": {"anyOf": copies}},
            {"type": "array", "items": copies[0], "minItems": len(copies), "maxItems": 2 * len(copies)},
            {"type": "array", "prefixItems": copies},
            {"type": "object", "properties": names, "required": sorted(names)[:some]},
            {"type": "object", "properties": names, "minProperties": some, "additionalProperties": copies[0]},
            {"type": "object", "patternProperties": {draw(PATTERNS): copies[0]}, "maxProperties": len(copies)},
            {"$defs": {"x": {"anyOf": [copies[0], {"type": "array", "items": {"$ref": "#/$defs/x"}}]}}}
            | {"$ref": "#/$defs/x"},
        ]
        return draw(st.sampled_from(forms))

    return larger()


_PARTS: SearchStrategy[Schema] = st.one_of(
    st.just({"const": 1}),
    st.just({}),
    st.builds(lambda least, more: {"type": "string", "minLength": least, "maxLength": least * more}, TIMES, TIMES),
    st.builds(lambda values: {"enum": [f"v{number}" for number in range(values)]}, TIMES),
    st.builds(
        lambda digits: {"type": "integer", "minimum": -(10**digits), "maximum": 7**digits},
        st.sampled_from((1, 20, 100)),
    ),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, PATTERNS),
)
SCHEMAS: SearchStrategy[Schema] = st.recursive(_PARTS, _larger_schemas, max_leaves=4)
