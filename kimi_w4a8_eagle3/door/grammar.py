"""Bounds on the compile time of a schema or pattern, by its structure, before the engine sees it.

SGLang compiles in threads of the scheduler's process, cannot stop one, and gives up only after a while
(SGLANG_GRAMMAR_MAX_POLL_ITERATIONS). docs/security.md has the times behind the limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from .ambiguity import TooAmbiguous, require_unambiguous
from .answers import Refusal
from .enforceable import require_enforceable
from .tools import compiled, functions

_MAX_BYTES = 65536
_MAX_TOOL_BYTES = 2**20  # of all tools together
_MAX_TOOL_OBJECTS = 8192  # SGLang checks each as a schema, 0.2 ms an object, while all other requests wait
_MAX_PROPERTIES = 2048
# Any of n optional properties may follow any other: n * n transitions, about eight times as many with a count of them.
_MAX_WAYS = 16384
_COUNTED = 8
_MAX_COUNT = 2**31 - 1  # minItems, maxLength and similar: xgrammar misreads larger values; all others cost the same
_MAX_PROPERTY_COUNT = 64
_MAX_LENGTHS = 16  # different string lengths; each is compiled separately
_MAX_TIMES = 65536  # repeats of a part by a pattern
_MAX_PATTERN = 1024
_MAX_PATTERNS = 4096  # characters of all patterns of a grammar
_MAX_REPEATS = 32  # repeats in all patterns of a grammar
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_LENGTHS = ("minLength", "maxLength")
_PATTERNS = ("pattern", "regex")
# Parts of structural tags that contain a grammar of their own, or repeat any other part, including one another.
_CLOSED_PARTS = ("grammar", "ebnf", "lark", "repeat", "plus", "star")


def check_text(grammar: Any, name: str) -> None:
    """Check a grammar that is sent as text: a pattern, or a schema or structural tag as JSON; None is allowed."""
    if grammar is None:
        return
    if name == "regex":
        _Cost(name).pattern(grammar)
        return
    _small(len(grammar), _MAX_BYTES, name)
    try:
        parsed = orjson.loads(grammar)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"{name} is not JSON: {str(error)[:200]}", param=name) from None
    _Cost(name).add(parsed)
    if name == "json_schema":
        require_enforceable(parsed, name)


def check_schema(grammar: Any, name: str) -> None:
    """Check a grammar that is part of the body, such as a response format or a schema; None is allowed."""
    if grammar is not None:
        _small(len(orjson.dumps(grammar)), _MAX_BYTES, name)
        _Cost(name).add(grammar)
        wanted = grammar.get("json_schema") or grammar.get("format") or {}
        if wanted.get("strict") is not False:
            require_enforceable(wanted.get("schema"), name)


def check_tools(tools: Sequence[Any], choice: Any = None, strict_only: bool = False) -> None:
    """Check all lists of tools together, because a choice among tools is one grammar. strict_only: see RequestRules."""
    _small(len(orjson.dumps(tools)), _MAX_TOOL_BYTES, "tools")
    if sum(1 for _ in _objects(tools)) > _MAX_TOOL_OBJECTS:
        raise Refusal(f"tools hold more than {_MAX_TOOL_OBJECTS} objects", param="tools")
    _Cost("tools").add(compiled(tools, choice) if strict_only else tools)
    for number, function in enumerate(functions(tools)):
        if function.get("strict"):
            require_enforceable(function.get("parameters"), f"tools[{number}]")


def _small(size: int, limit: int, name: str) -> None:
    if size > limit:
        raise Refusal(f"{name} is larger than {limit} bytes", param=name)


class _Cost:
    """Running cost of one grammar; raises Refusal when it exceeds a limit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._properties = self._ways = self._repeats = self._patterns = 0
        self._lengths: set[int] = set()

    def add(self, grammar: Any) -> None:
        """Add every object in `grammar` as if it were a schema, whether or not the compiler reads it."""
        for schema in _objects(grammar):
            if schema.get("type") in _CLOSED_PARTS:
                self._refuse(f"holds a {schema['type']}, which is not for clients")
            self._add_properties(schema)
            self._add_counts(schema)
            for key in _PATTERNS:
                if isinstance(schema.get(key), str):
                    self.pattern(schema[key])
            if isinstance(schema.get("patternProperties"), dict):
                for pattern in schema["patternProperties"]:
                    self.pattern(pattern)

    def pattern(self, text: str) -> None:
        """Add one regular expression."""
        self._repeats += sum(map(text.count, "*+?{"))
        self._patterns += len(text)
        if len(text) > _MAX_PATTERN or self._patterns > _MAX_PATTERNS:
            self._refuse(
                f"holds a pattern longer than {_MAX_PATTERN} characters, or patterns of more than {_MAX_PATTERNS}"
            )
        if self._repeats > _MAX_REPEATS:
            self._refuse(f"holds patterns with more than {_MAX_REPEATS} of * + ? and {{")
        if any(len(digits) > len(str(_MAX_TIMES)) for digits in re.findall(r"\d+", text)):
            self._refuse(f"holds a pattern that repeats more than {_MAX_TIMES} times")
        try:
            require_unambiguous(text)
        except TooAmbiguous:
            self._refuse(
                "holds a pattern that can match some texts in more and more ways, or is too large to check; remove a "
                "repeat inside a repeat, or put between them something that neither matches"
            )

    def _add_properties(self, schema: Mapping[str, Any]) -> None:
        groups = [schema[key] for key in ("properties", "patternProperties") if isinstance(schema.get(key), dict)]
        number = sum(map(len, groups))
        required = schema.get("required")
        optional = max(0, number - (len(required) if isinstance(required, list) else 0))
        counted = any(schema.get(key) is not None for key in ("minProperties", "maxProperties"))
        self._properties += number
        self._ways += optional * optional * (_COUNTED if counted else 1)
        if self._properties > _MAX_PROPERTIES:
            self._refuse(f"has more than {_MAX_PROPERTIES} properties")
        if self._ways > _MAX_WAYS:
            self._refuse(
                "has too many optional properties to be compiled in time: name them in `required`, or leave out "
                "minProperties and maxProperties"
            )

    def _add_counts(self, schema: Mapping[str, Any]) -> None:
        for key in _COUNTS:
            value = schema.get(key)
            if not isinstance(value, int | float):
                continue
            limit = _MAX_PROPERTY_COUNT if key.endswith("Properties") else _MAX_COUNT
            if value > limit:
                self._refuse(f"has a {key} above {limit}")
            if key in _LENGTHS:
                self._lengths.add(int(value))
        if len(self._lengths) > _MAX_LENGTHS:
            self._refuse(f"has more than {_MAX_LENGTHS} different string lengths")

    def _refuse(self, why: str) -> None:
        raise Refusal(f"{self._name} {why}", param=self._name)


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
