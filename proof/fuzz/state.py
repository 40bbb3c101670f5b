"""Clients that leave, wait or come twice, and work that grows faster than the body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from .grammars import PATTERNS, SCHEMAS
from .requests import CHAT, COMPLETIONS, RESPONSES, Case, HttpRequest, Wire, chat_wire, json_request, question

# 400 words are answered, 4000 times three are beyond the context: a prompt that just fits takes a CPU half a minute.
_SIZES = (10, 100, 400, 4000, 30_000)
_SLOW = st.sampled_from(
    (r"((.|\s)+)+\x00", "(a+)+$", "(a|a)*b", "(.*){1,32}x", "([a-z]+)*[0-9]", "(x{1,100}){1,100}", "a{1000}{1000}")
)


def state_case(draw: st.DrawFn, model: str) -> Case:
    """Draw one of seven kinds of clients."""
    whole = chat_wire(model).body
    kind = draw(
        st.sampled_from(("one id twice", "abort storm", "half-closed", "slow", "pipeline", "responses", "crowd"))
    )
    if kind == "one id twice":  # in the body, and in the header that SGLang takes it from
        body = question(model, rid="one") if draw(st.booleans()) else question(model)
        headers = (("content-type", "application/json"), ("x-override-rid", "one"))
        return Case("state", kind, (HttpRequest("POST", CHAT, json.dumps(body).encode(), headers),) * 2)
    if kind == "abort storm":
        long = json.dumps(question(model, stream=True, max_tokens=200, ignore_eos=True)).encode()
        leave = draw(st.lists(st.floats(0, 0.3), min_size=8, max_size=8))
        return Case("state", kind, tuple(HttpRequest("POST", CHAT, long, leave_after_s=seconds) for seconds in leave))
    if kind == "half-closed":
        return Case("state", kind, (chat_wire(model, half_close=True, patience_s=5.0),))
    if kind == "slow":
        at = len(whole) - draw(st.integers(1, 40))
        pieces = (whole[:-60], *(whole[start : start + 4] for start in range(len(whole) - 60, at, 4)))
        return Case("state", "slow body", (Wire(pieces, pause_s=0.05, half_close=draw(st.booleans())),))
    if kind == "pipeline":
        return Case("state", kind, (Wire((whole.replace(b"Connection: close\r\n", b"") * 3 + whole,)),))
    if kind == "responses":
        response = {"model": model, "input": "Tom", "max_output_tokens": 2, "previous_response_id": "resp_x"}
        cancel = HttpRequest("POST", "/v1/responses/resp_x/cancel")
        return Case("state", kind, (json_request("POST", RESPONSES, response), cancel))
    return Case("state", kind, (json_request("POST", CHAT, question(model, n=4, temperature=1.0, seed=7)),) * 8)


def cost_case(draw: st.DrawFn, model: str) -> Case:
    """Draw work that grows faster than the body, in some size."""
    size = draw(st.sampled_from(_SIZES))
    name, path, fields = draw(st.sampled_from(_COSTS))
    least = {
        CHAT: question(model, max_tokens=8),
        COMPLETIONS: {"model": model, "prompt": "Tom ", "max_tokens": 8},
        RESPONSES: {"model": model, "input": "Tom", "max_output_tokens": 2},
    }
    body = json.dumps(least[path] | fields(size, draw)).encode()
    leave = draw(st.sampled_from((None, None, 1.0)))
    return Case("cost", f"{name} {size}", (HttpRequest("POST", path, body, leave_after_s=leave),))


def _names(size: int) -> dict[str, Any]:
    return {f"p{number}": {"type": "integer"} for number in range(size)}


def _tools(size: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}] * size}


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _says(text: str, messages: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}] * messages}


# What a body gets for a size: name, path, fields.
_COSTS: tuple[tuple[str, str, Callable[[int, st.DrawFn], dict[str, Any]]], ...] = (
    ("stop pattern", CHAT, lambda _, draw: {"stop_regex": draw(_SLOW)}),
    ("pattern", COMPLETIONS, lambda _, draw: {"regex": draw(_SLOW)}),
    ("composed pattern", COMPLETIONS, lambda _, draw: {"regex": draw(PATTERNS)}),
    ("schema with a pattern", CHAT, lambda _, draw: _schema({"type": "string", "pattern": draw(_SLOW)})),
    (
        "schema with properties",
        CHAT,
        lambda n, _: _schema({"type": "object", "properties": _names(n), "minProperties": n // 2}),
    ),
    ("schema with values", CHAT, lambda n, _: _schema({"enum": [f"v{number}" for number in range(n)]})),
    ("schema with counts", CHAT, lambda n, _: _schema({"type": "array", "minItems": n, "items": {"maxLength": n}})),
    ("composed schema", CHAT, lambda _, draw: _schema(draw(SCHEMAS))),
    ("composed arguments", CHAT, lambda _, draw: _tools(1, draw(SCHEMAS)) | {"tool_choice": "required"}),
    ("tool with properties", CHAT, lambda n, _: _tools(1, {"type": "object", "properties": _names(n)})),
    ("many tools", CHAT, lambda n, _: _tools(n, {"type": "object", "properties": _names(1)})),
    ("long prompt", COMPLETIONS, lambda n, _: {"prompt": "Tom " * n * 3}),
    ("data: prompt", COMPLETIONS, lambda n, _: {"prompt": "data:" + "Tom " * n * 3}),
    ("data: message", CHAT, lambda n, _: _says("data:," + "Tom " * n * 3)),
    ("many messages", CHAT, lambda n, _: _says("Tom", n)),
    ("many prompts", COMPLETIONS, lambda n, _: {"prompt": ["Tom "] * n, "n": 2, "max_tokens": 1}),
    ("stop texts", CHAT, lambda n, _: {"stop": [f"{number}?" for number in range(n)]}),
    ("biases", CHAT, lambda n, _: {"logit_bias": {str(number): 1 for number in range(n)}}),
    ("logprobs", CHAT, lambda n, _: {"logprobs": True, "top_logprobs": min(n, 128)}),
    ("logprobs of the prompt", COMPLETIONS, lambda n, _: {"prompt": "Tom " * n * 3, "echo": True, "logprobs": 20}),
    ("metadata", RESPONSES, lambda n, _: {"metadata": _names(n)}),
    ("template", CHAT, lambda n, _: {"chat_template_kwargs": _names(n)}),
)
