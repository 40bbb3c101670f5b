"""What needs more than one request, or more work than its size: clients that leave, wait or come twice; long input."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from .requests import KEY, Case, Request, Wire, json_request, wire_request

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_RESPONSES = "/v1/responses"
# 400 words are answered, 4000 times three are beyond the context: a prompt that just fits takes a CPU half a minute.
_SIZES = (10, 100, 400, 4000, 30_000)
_PATTERNS = (
    r"((.|\s)+)+\x00",
    "(a+)+$",
    "(a|a)*b",
    "(.*){1,32}x",
    "([a-z]+)*[0-9]",
    "(x{1,100}){1,100}",
    "a{1000}{1000}",
)


def question(model: str, **fields: Any) -> dict[str, Any]:
    """A small chat request with these fields."""
    return {"model": model, "messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 4, **fields}


def chat_wire(model: str, **manners: Any) -> Wire:
    """A small chat request as bytes, from a client with these manners."""
    headers = [("Host", "x"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}")]
    return wire_request("POST", _CHAT, headers, json.dumps(question(model)).encode(), **manners)


def state_case(visit: int, random: Random, model: str) -> Case:
    """One of seven kinds of clients, in turn."""
    kind = visit % 7
    whole = chat_wire(model).pieces[0]
    if kind == 0:  # one id, in the body and in the header that SGLang takes it from
        body = question(model, rid="one") if visit % 2 else question(model)
        headers = (("content-type", "application/json"), ("x-override-rid", "one"))
        request = Request("POST", _CHAT, json.dumps(body).encode(), headers)
        return Case("state", "one id twice", (request, request))
    if kind == 1:
        long = question(model, stream=True, max_tokens=200, ignore_eos=True)
        leave = [random.random() * 0.3 for _ in range(8)]
        storm = [Request("POST", _CHAT, json.dumps(long).encode(), leave_after_s=each) for each in leave]
        return Case("state", "abort storm", tuple(storm))
    if kind == 2:
        return Case("state", "half-closed", (chat_wire(model, half_close=True, patience_s=5.0),))
    if kind == 3:
        at = len(whole) - random.randint(1, 40)
        pieces = (whole[:-60], *(whole[each : each + 4] for each in range(len(whole) - 60, at, 4)))
        return Case("state", "slow body", (Wire(pieces, pause_s=0.05, half_close=random.random() < 0.5),))
    if kind == 4:
        return Case("state", "pipeline", (Wire((whole.replace(b"Connection: close\r\n", b"") * 3 + whole,)),))
    if kind == 5:
        response = {"model": model, "input": "Tom", "max_output_tokens": 2, "previous_response_id": "resp_x"}
        cancel = Request("POST", "/v1/responses/resp_x/cancel")
        return Case("state", "responses", (json_request("POST", _RESPONSES, response), cancel))
    crowd = json_request("POST", _CHAT, question(model, n=4, temperature=1.0, seed=7))
    return Case("state", "crowd", (crowd,) * 8)


def cost_case(visit: int, random: Random, model: str) -> Case:
    """Work that grows faster than the body, one kind after the other, in some size."""
    size = random.choice(_SIZES)
    name, path, fields = _COSTS[visit % len(_COSTS)]
    least = {
        _CHAT: question(model, max_tokens=8),
        _COMPLETIONS: {"model": model, "prompt": "Tom ", "max_tokens": 8},
        _RESPONSES: {"model": model, "input": "Tom", "max_output_tokens": 2},
    }
    body = least[path] | fields(size, random)
    request = Request("POST", path, json.dumps(body).encode(), leave_after_s=random.choice((None, None, 1.0)))
    return Case("cost", f"{name} {size}", (request,))


def _names(size: int) -> dict[str, Any]:
    return {f"p{each}": {"type": "integer"} for each in range(size)}


def _tools(size: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}] * size}


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _says(text: str, messages: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}] * messages}


def composed(random: Random, room: int = 1000) -> dict[str, Any]:
    """A JSON schema of parts that are harmless one by one: what compiling it costs is in how they are put together.

    room: how many parts it may have at most.
    """
    count = random.choice((1, 2, 5, 20, 100))
    if room < 2 * count or random.random() < 0.1:
        text = {"type": "string", "minLength": count, "maxLength": count * random.choice((1, 3, 50))}
        values = {"enum": [f"{'v' * count}{each}" for each in range(count)]}
        number = {"type": "integer", "minimum": -(10**count), "maximum": 7**count}
        return random.choice((text, values, number, {"type": "string", "pattern": _pattern(random)}, {}))
    inner, other = composed(random, room // (2 * count)), composed(random, room // (2 * count))
    properties = {f"p{each}": inner for each in range(count)}
    return random.choice(
        (
            {"type": "object", "properties": properties, "required": sorted(properties)[: count // 2]},
            {"type": "object", "properties": properties, "minProperties": count // 2, "additionalProperties": other},
            {"type": "object", "patternProperties": {_pattern(random): inner}, "maxProperties": count},
            {"type": "array", "items": inner, "minItems": count, "maxItems": 2 * count},
            {"type": "array", "prefixItems": [inner, other] * count},
            {random.choice(("anyOf", "oneOf", "allOf")): [inner, other] * count},
            {
                "$defs": {"x": {"anyOf": [inner, {"type": "array", "items": {"$ref": "#/$defs/x"}}]}},
                "$ref": "#/$defs/x",
            },
        )
    )


def _pattern(random: Random, depth: int = 3) -> str:
    if depth == 0:
        return random.choice(("a", ".", "[^a]", r"\d", r"\w", r"\s", "[a-z0-9_]", "(a|b)"))
    inner = _pattern(random, depth - 1)
    other = _pattern(random, depth - 1)
    return random.choice((f"({inner}){{1,{random.choice((3, 30, 300))}}}", f"({inner}|{other})*", f"({inner})+{other}"))


# What a body gets for a size: name, path, fields.
_COSTS: tuple[tuple[str, str, Callable[[int, Random], dict[str, Any]]], ...] = (
    ("stop pattern", _CHAT, lambda _, random: {"stop_regex": random.choice(_PATTERNS)}),
    ("pattern", _COMPLETIONS, lambda _, random: {"regex": random.choice(_PATTERNS)}),
    ("composed pattern", _COMPLETIONS, lambda _, random: {"regex": _pattern(random)}),
    (
        "schema with a pattern",
        _CHAT,
        lambda _, random: _schema({"type": "string", "pattern": random.choice(_PATTERNS)}),
    ),
    (
        "schema with properties",
        _CHAT,
        lambda n, _: _schema({"type": "object", "properties": _names(n), "minProperties": n // 2}),
    ),
    ("schema with values", _CHAT, lambda n, _: _schema({"enum": [f"v{each}" for each in range(n)]})),
    ("schema with counts", _CHAT, lambda n, _: _schema({"type": "array", "minItems": n, "items": {"maxLength": n}})),
    ("composed schema", _CHAT, lambda _, random: _schema(composed(random))),
    ("composed arguments", _CHAT, lambda _, random: _tools(1, composed(random)) | {"tool_choice": "required"}),
    ("tool with properties", _CHAT, lambda n, _: _tools(1, {"type": "object", "properties": _names(n)})),
    ("many tools", _CHAT, lambda n, _: _tools(n, {"type": "object", "properties": _names(1)})),
    ("long prompt", _COMPLETIONS, lambda n, _: {"prompt": "Tom " * n * 3}),
    ("data: prompt", _COMPLETIONS, lambda n, _: {"prompt": "data:" + "Tom " * n * 3}),
    ("data: message", _CHAT, lambda n, _: _says("data:," + "Tom " * n * 3)),
    ("many messages", _CHAT, lambda n, _: _says("Tom", n)),
    ("many prompts", _COMPLETIONS, lambda n, _: {"prompt": ["Tom "] * n, "n": 2, "max_tokens": 1}),
    ("stop texts", _CHAT, lambda n, _: {"stop": [f"{each}?" for each in range(n)]}),
    ("biases", _CHAT, lambda n, _: {"logit_bias": {str(each): 1 for each in range(n)}}),
    ("logprobs", _CHAT, lambda n, _: {"logprobs": True, "top_logprobs": min(n, 128)}),
    ("logprobs of the prompt", _COMPLETIONS, lambda n, _: {"prompt": "Tom " * n * 3, "echo": True, "logprobs": 20}),
    ("metadata", _RESPONSES, lambda n, _: {"metadata": _names(n)}),
    ("template", _CHAT, lambda n, _: {"chat_template_kwargs": _names(n)}),
)
