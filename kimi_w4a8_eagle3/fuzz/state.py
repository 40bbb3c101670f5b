"""What needs more than one request, or more work than its size: clients that leave, wait or come twice; long input."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from .requests import KEY, Case, Request, Wire, json_request, wire_request

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
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
        return Case("state", "responses", (json_request("POST", "/v1/responses", response), cancel))
    crowd = json_request("POST", _CHAT, question(model, n=4, temperature=1.0, seed=7))
    return Case("state", "crowd", (crowd,) * 8)


def cost_case(visit: int, random: Random, model: str) -> Case:
    """Work that grows faster than the body, one kind after the other, in some size."""
    size = random.choice(_SIZES)
    word, names = "Tom ", {f"p{each}": {"type": "integer"} for each in range(size)}
    pattern = random.choice(_PATTERNS)

    def schema(value: Any) -> dict[str, Any]:
        return question(
            model, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}}, max_tokens=8
        )

    deep: dict[str, Any] = {"type": "string"}
    for _ in range(min(size, 12)):
        deep = {"anyOf": [deep, {"type": "array", "items": deep}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": names}}}
    kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("stop pattern", _CHAT, question(model, stop_regex=pattern, max_tokens=8)),
        ("pattern", _COMPLETIONS, {"model": model, "prompt": word, "regex": pattern, "max_tokens": 8}),
        ("schema with a pattern", _CHAT, schema({"type": "string", "pattern": pattern})),
        ("schema with properties", _CHAT, schema({"type": "object", "properties": names, "minProperties": size // 2})),
        ("schema with values", _CHAT, schema({"enum": [f"v{each}" for each in range(size)]})),
        ("schema with counts", _CHAT, schema({"type": "array", "minItems": size, "items": {"maxLength": size}})),
        ("deep alternatives", _CHAT, schema(deep)),
        ("tool with properties", _CHAT, question(model, tools=[tool])),
        ("many tools", _CHAT, question(model, tools=[tool] * min(size, 50))),
        ("long prompt", _COMPLETIONS, {"model": model, "prompt": word * size * 2, "max_tokens": 2}),
        ("data: prompt", _COMPLETIONS, {"model": model, "prompt": "data:" + word * size * 2, "max_tokens": 2}),
        ("data: message", _CHAT, question(model, messages=[{"role": "user", "content": "data:," + word * size * 2}])),
        ("many messages", _CHAT, question(model, messages=[{"role": "user", "content": word}] * size)),
        ("many prompts", _COMPLETIONS, {"model": model, "prompt": [word] * size, "n": 2, "max_tokens": 1}),
        ("stop texts", _CHAT, question(model, stop=[f"{each}?" for each in range(size)], max_tokens=8)),
        ("biases", _CHAT, question(model, logit_bias={str(each): 1 for each in range(size)})),
        ("logprobs", _CHAT, question(model, logprobs=True, top_logprobs=min(size, 128), max_tokens=8)),
        (
            "logprobs of the prompt",
            _COMPLETIONS,
            {"model": model, "prompt": word * min(size, 4000), "echo": True, "logprobs": 20, "max_tokens": 1},
        ),
        ("metadata", "/v1/responses", {"model": model, "input": "Tom", "max_output_tokens": 2, "metadata": names}),
        ("template", _CHAT, question(model, chat_template_kwargs=names)),
    )
    name, path, body = kinds[visit % len(kinds)]
    request = Request("POST", path, json.dumps(body).encode(), leave_after_s=random.choice((None, None, 1.0)))
    return Case("cost", f"{name} {size}", (request,))
