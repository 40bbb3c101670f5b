"""Twice as much from a client or a model takes at most 2.4 times the steps.

Steps are lines of Python and comparisons of names, so that no other process disturbs them. C code is not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.gateway_app import App, ScriptedEngine

from kimi_w4a8_eagle3.gateway.endpoints import ENDPOINTS
from kimi_w4a8_eagle3.gateway.enforceable import require_enforceable
from kimi_w4a8_eagle3.gateway.errors import Refusal
from kimi_w4a8_eagle3.gateway.reader import Reader

SERVICE = App(ScriptedEngine(), context=2**20).service
TEXT, IMAGE = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
CALL = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER, TOOL = {"role": "user", "content": "x"}, {"type": "function", "function": {"name": "f", "parameters": {}}}
LISTS = {"messages": USER, "parts": TEXT, "images": IMAGE, "tools": TOOL, "calls": CALL, "objects": {}, "arrays": []}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/tokenize")


class Name(str):
    """A name whose comparisons are counted."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def named(size: int) -> dict[Any, Any]:
    return {Name(f"p{number}"): {"type": "string"} for number in range(size)}


SCHEMAS: dict[str, Callable[[int], Any]] = {
    "required": lambda size: {"properties": named(size), "required": [*named(size)]},
    "enum": lambda size: {"enum": [*named(size)]},
    **{word: lambda size, word=word: {word: [{"type": "string"}] * size} for word in ("anyOf", "oneOf", "prefixItems")},
    **{word: lambda size, word=word: {word: named(size)} for word in ("properties", "$defs", "patternProperties")},
    "depth": lambda size: json.loads('{"items":' * (size // 40) + "{}" + "}" * (size // 40)),
}


def body(path: str, name: str, size: int) -> bytes:
    many: list[Any] = [LISTS[name]] * size
    said = {"messages": many, "calls": [{"role": "assistant", "tool_calls": many}], "tools": [USER]}
    messages = said.get(name, [{"role": "user", "content": many}])
    return json.dumps(
        {"input" if "responses" in path else "messages": messages, "tools": many * (name == "tools")}
    ).encode()


def steps(work: Callable[[], object]) -> int:
    count, Name.compared = 0, 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        with suppress(Refusal, RecursionError):
            work()
    finally:
        sys.settrace(None)
    return count + Name.compared


def ask(path: str, name: str, size: int) -> None:
    SERVICE.read(ENDPOINTS[path], body(path, name, size))


def read(piece: str, size: int, opening: str) -> None:
    reader = Reader(thinking=False, opens=False, calls=True)
    for part in (opening, *[piece] * size):
        reader.read(part)
    reader.read("", ended=True)


BEGIN = "<|tool_calls_section_begin|><|tool_call_begin|>"
BEGINS = ("", BEGIN, f"{BEGIN}f:0<|tool_call_argument_begin|>")
PIECES = ("x", " ", "<|", "</think>", BEGIN, "<|tool_call_end|>", '"', "\\", "{")
SHAPES: dict[str, Callable[[int], object]] = {
    **{
        f"{p} {name}": lambda n, p=p, name=name: SERVICE.read(ENDPOINTS[p], body(p, name, n))
        for p in PATHS
        for name in LISTS
    },
    **{f"schema {name}": lambda n, make=make: require_enforceable(make(n), "x") for name, make in SCHEMAS.items()},
    **{f"answer {begin!r} {p!r}": lambda n, p=p, begin=begin: read(p, n, begin) for p in PIECES for begin in BEGINS},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_twice_as_much_takes_at_most_2_4_times_the_steps(shape: Callable[[int], object]) -> None:
    _, once, twice = (steps(lambda size=size: shape(size)) for size in (10, 600, 1200))  # the first one fills caches
    assert twice <= 2.4 * once, f"{once} steps, then {twice}"
